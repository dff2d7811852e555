"""The pages "Singleton locks" of Django's admin: which locks exist, what they did, and how to release one.

They are a client of `celery_singleton_lock.locks`, for Celery's current app, as the project's `__init__` module makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from celery import current_app
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import path, reverse

from celery_singleton_lock import locks
from celery_singleton_lock.contrib.django.models import Lock
from celery_singleton_lock.contrib.django.rows import contains, row_of, row_of_run, sums_of
from celery_singleton_lock.errors import ConfigurationError, StoreError

Found = TypeVar("Found")


def _pauses_first(lock: Any) -> Any:
    return lock.holder.state != "paused", lock.since


#: What the names of our URLs begin with; Django's own pages link to `…_changelist`.
NAME = "celery_singleton_lock_lock"


class LockAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """Three pages, each in place of one of Django's that would read a table."""

    list_per_page = 100

    # -- permissions ---------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Whether the user may release locks whose body does not run."""
        return self._has(request, "view") and self._has(request, "release")

    def has_force_permission(self, request: HttpRequest) -> bool:
        """Whether the user may release a lock although its body may run."""
        return self.has_release_permission(request) and self._has(request, "force_release")

    def _has(self, request: HttpRequest, verb: str) -> bool:
        return bool(request.user.has_perm(f"celery_singleton_lock.{verb}_lock"))

    # -- pages ---------------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        """Return the URLs of the pages, in place of Django's own."""
        own = self.admin_site.admin_view  # only for users who may log in here; it checks the CSRF token
        return [
            path("", own(self.changelist_view), name=f"{NAME}_changelist"),
            path("statistics/", own(self.statistics_view), name=f"{NAME}_statistics"),
            path("release/", own(self.release_view), name=f"{NAME}_release"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the locks that exist, the oldest first."""
        self._require(self._has(request, "view"))
        app = current_app._get_current_object()
        task, node, text = (request.GET.get(name, "").strip() for name in ("task", "node", "q"))
        read = self._ask(request, lambda: (locks.tasks(app), sorted(locks.find(app, task), key=_pauses_first)))
        tasks, found = read or ((), [])
        spec = [lock for lock in found if node in ("", lock.holder.node) and contains(lock, text)]
        page = Paginator(spec, self.list_per_page).get_page(request.GET.get("p"))
        page.object_list = [row_of(lock) for lock in page.object_list]
        others = request.GET.copy()
        others.pop("p", None)
        return self._page(
            request,
            "list",
            "Locks",
            filters={"task": (task, tasks), "node": (node, sorted({lock.holder.node for lock in found} - {""}))},
            text=text,
            page=page,
            query=others.urlencode(),
            back=request.GET.urlencode(),
            can_release=self.has_release_permission(request),
        )

    def statistics_view(self, request: HttpRequest) -> HttpResponse:
        """Show the counters of all tasks, or of one and its last runs."""
        self._require(self._has(request, "view"))
        app, task = current_app._get_current_object(), request.GET.get("task", "")
        read = self._ask(request, lambda: (locks.stats(app, task), locks.history(app, task) if task else ()))
        found, runs = read or ((), ())
        counters = found[0].counters.items() if task and found else ()
        return self._page(
            request,
            "statistics",
            task or "Statistics",
            task=task,
            rows=[sums_of(one) for one in found],
            counters=sorted(one for one in counters if not one[0].startswith("last_")),  # these are times, in `rows`
            runs=[row_of_run(run) for run in runs],
        )

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask the holder's node and show what it says; release the lock, or end a pause, when the user has confirmed that."""
        self._require(self.has_release_permission(request))
        if request.method != "POST":  # of a user who has had to log in again
            return self._to_list(request)
        if "resume" in request.POST:
            return self._resume(request, request.POST["resume"])
        key, verb = request.POST.get("key", ""), request.POST.get("verb")
        self._require(verb != "force" or self.has_force_permission(request))
        app, task_id = current_app._get_current_object(), request.POST.get("task_id", "")
        options = {"force": verb == "force", "dry_run": verb not in ("release", "force"), "task_id": task_id}
        done = self._ask(request, lambda: locks.release(app, key, **options))
        if done and done.outcome in ("refused", "would be released"):
            shown = {"key": key, "done": done, "can_force": self.has_force_permission(request), "back": _back(request)}
            return self._page(request, "release", "Release a lock", **shown)
        if done:
            self._tell(request, key, str(done), done.released)
        return self._to_list(request)

    # -- parts of them -------------------------------------------------------------------------

    def _resume(self, request: HttpRequest, key: str) -> HttpResponse:
        if request.POST.get("verb") != "resume":
            return self._page(request, "release", "End a pause", key=key, back=_back(request))
        ended = self._ask(request, lambda: locks.resume(current_app._get_current_object(), key))
        if ended is not None:
            self._tell(request, key, "the pause was ended" if ended else "there is no pause", ended)
        return self._to_list(request)

    def _tell(self, request: HttpRequest, key: str, what: str, has_changed: bool) -> None:
        """Tell the user what was done, and Django's log of what users did."""
        self.message_user(request, f"{what}; key {key}", messages.SUCCESS if has_changed else messages.WARNING)
        if has_changed:
            self.log_change(request, Lock(key), what)

    def _require(self, allowed: bool) -> None:
        if not allowed:
            raise PermissionDenied

    def _ask(self, request: HttpRequest, call: Callable[[], Found]) -> Found | None:
        """Return the answer of the store. None: there is none, and the user is told why."""
        try:
            return call()
        except StoreError as error:
            self.message_user(request, f"The store of locks: {error}", messages.ERROR)
        except ConfigurationError as error:
            # Not the name of a setting first, as Django's template makes the first letter a capital.
            self.message_user(request, f"Configuration: {error}", messages.ERROR)
        return None

    def _to_list(self, request: HttpRequest) -> HttpResponse:
        path, query = reverse(f"admin:{NAME}_changelist", current_app=self.admin_site.name), _back(request)
        return HttpResponseRedirect(f"{path}?{query}" if query else path)

    def _page(self, request: HttpRequest, template: str, title: str, **context: Any) -> HttpResponse:
        request.current_app = self.admin_site.name
        common = {**self.admin_site.each_context(request), "opts": self.opts, "title": title}
        return TemplateResponse(request, f"admin/celery_singleton_lock/{template}.html", {**common, **context})


def _back(request: HttpRequest) -> str:
    """Return the filters and the page of the list from which an action came, as a query."""
    return str(QueryDict(request.POST.get("back", "")).urlencode())


admin.site.register(Lock, LockAdmin)
