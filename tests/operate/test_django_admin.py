"""The pages of Django's admin, in a real project with a real worker: which locks exist, what they did, how to release one.

`DJANGO_PICTURE=docs/images/django-admin.png` keeps the picture that `test_picture` takes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from celery_singleton_lock import locks
from celery_singleton_lock.store.protocol import AcquireStatus
from celery_singleton_lock.store.redis import RedisStore, connector
from celery_singleton_lock.store.requests import LeaseSpec
from tests.operate.browser import Browser, missing_programs
from tests.operate.django_project import WITH_ADMIN, DjangoProject
from tests.operate.web_client import WebClient
from tests.servers import Process, RedisServer, free_port, is_listening, required, until

pytestmark = pytest.mark.long

pytest.importorskip("django")

LIST = "/admin/celery_singleton_lock/lock/"
STATISTICS, RELEASE = f"{LIST}statistics/", f"{LIST}release/"
CLOSE, REPORT = "books.tasks.close", "books.tasks.report"
#: The users, and what they may do with locks; `root` may do everything.
USERS = {
    "nobody": (),
    "viewer": ("view_lock",),
    "operator": ("view_lock", "release_lock"),
    "expert": ("view_lock", "release_lock", "force_release_lock"),
    "blind": ("release_lock", "force_release_lock"),
}
PASSWORD = "of-a-test"
MAKE_USERS = """
from django.contrib.auth.models import Permission, User
from django.contrib.auth.hashers import make_password
password = make_password({password!r})
User.objects.create(username="root", password=password, is_staff=True, is_superuser=True)
for name, allowed in {users!r}.items():
    user = User.objects.create(username=name, password=password, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=allowed))
"""


@dataclass
class Site:
    """The project, its servers, and an app that knows them."""

    project: DjangoProject
    redis: RedisServer
    address: str
    app: Celery
    numbers: Iterator[int] = field(default_factory=lambda: count(2))  # of more workers

    def client(self, user: str = "") -> WebClient:
        """Return a client that is logged in as this user."""
        return WebClient(self.address, user, PASSWORD if user else "")

    def key(self, task: str, name: str) -> str:
        """Return the key of some lock of a task."""
        return f"singleton:{{{task}}}:lock:{name}"

    def leave_lock(self, node: str, task: str = CLOSE, task_id: str = "", name: str = "") -> str:
        """Acquire a lock as a body of this node would that nobody knows any more; return its key."""
        key = self.key(task, name or secrets.token_hex(16))
        base, _, digest = key.rpartition(":lock:")
        spec = LeaseSpec(base, digest, secrets.token_hex(16), 3600.0, task_id or "vanished", node, 4711)
        store = RedisStore(connector(self.redis.url(), {}), history=10)
        assert AcquireStatus.GRANTED is store.acquire(spec).status
        store.close()
        return key

    def send(self, task: str, *args: Any, **kwargs: Any) -> str:
        """Send a task to the first worker; return its id."""
        return str(self.app.send_task(task, args, kwargs, queue="worker-1").id)

    def lock_of(self, task_id: str) -> locks.Lock:
        """Wait until a task holds a lock."""
        return until(lambda: locks.show(self.app, task_id), f"{task_id} holds its lock")[0]

    def end(self, account: object) -> None:
        """Let the body of an account end."""
        (self.project.directory / f"end-{account}").touch()


@contextmanager
def worker(project: DjangoProject, name: str) -> Iterator[Process]:
    """Run a worker with a queue of its own."""
    options = ("--pool", "prefork", "--concurrency", "4", "--without-mingle", "--without-gossip", "--loglevel", "INFO")
    words = ("-m", "celery", "-A", "shop", "worker", "--hostname", f"{name}@local", "--queues", name, *options)
    process = project.process(name, *words)
    process.start()
    try:
        until(lambda: " ready." in process.output(), f"{name} is ready")
        yield process
    finally:
        process.stop()


@contextmanager
def served(project: DjangoProject, settings: str = "shop.settings") -> Iterator[str]:
    """Run Django's own server; yield the site's address."""
    port = free_port()
    words = ("runserver", "--noreload", "--skip-checks", "--settings", settings, f"127.0.0.1:{port}")
    server = project.process("server", "-m", "django", *words)
    server.start()
    try:
        until(lambda: is_listening(port), "the site listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The project with its database, a Redis, a worker `worker-1@local`, and Django's own server."""
    project = DjangoProject(tmp_path_factory.mktemp("site"), WITH_ADMIN)
    with RedisServer() as redis, ExitStack() as stack:
        urls = f'CELERY_BROKER_URL = "{redis.url(1)}"\nCELERY_SINGLETON_LOCK_URL = "{redis.url()}"'
        project.write({"shop/settings.py": urls})
        for command in (("migrate",), ("shell", "-c", MAKE_USERS.format(password=PASSWORD, users=USERS))):
            done = project.manage(*command)
            assert 0 == done.returncode, done.stderr
        app = stack.enter_context(Celery("operator", broker=redis.url(1), set_as_current=False))
        app.conf.singleton_lock_url = redis.url()
        stack.enter_context(worker(project, "worker-1"))
        yield Site(project, redis, stack.enter_context(served(project)), app)


@pytest.fixture
def killed(site: Site) -> str:
    """The key of a lock whose worker was killed."""
    name = f"worker-{next(site.numbers)}"
    with worker(site.project, name) as one:
        task_id = str(site.app.send_task(CLOSE, (name,), queue=name).id)
        key = site.lock_of(task_id).key
        one.kill()
    return key


@pytest.fixture
def running(site: Site) -> Iterator[locks.Lock]:
    """The lock of a body that runs on the first worker."""
    account = secrets.token_hex(4)
    lock = site.lock_of(site.send(CLOSE, account))
    yield lock
    site.end(account)
    until(lambda: not locks.show(site.app, lock.holder.task_id), "the body has ended")


@pytest.fixture(scope="module")
def open_browser(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Browser]]:
    """Return a function that logs a user in with the form of the admin, and shows the list of locks.

    Not installed: skipped locally, an error in CI.
    """
    missing = " and ".join(missing_programs())
    if missing and not required("CI"):
        pytest.skip(f"no {missing} installed")
    assert not missing
    browser = Browser(tmp_path_factory.mktemp("browser"))

    def log_in(user: str) -> Browser:
        browser.open(f"{site.address}/admin/")
        browser.forget_cookies()
        browser.open(f"{site.address}/admin/")
        browser.type("#id_username", user)
        browser.type("#id_password", PASSWORD)
        browser.click("Log in")
        browser.click("Locks")
        return browser

    try:
        yield log_in
    finally:
        browser.close()


# -- in the browser ----------------------------------------------------------------------------


def ask(browser: Browser, key: str) -> Browser:
    """Ask for the release of a lock in the list, again until its worker answers in its second; return the browser."""

    def is_answered() -> bool:
        browser.click_in_row(key, "Release…")
        if "The worker did not answer." not in browser.text():
            return True
        browser.click("Back to the list")
        return False

    until(is_answered, "the worker answers in time")
    return browser


def release(browser: Browser, key: str) -> None:
    """Release a lock in the list, again until its worker answers in its second."""
    ask(browser, key).click("Release the lock")
    while "The worker did not answer." in browser.text():  # nothing was released
        browser.click("Back to the list")
        ask(browser, key).click("Release the lock")


def test_killed_worker(site: Site, open_browser: Callable[[str], Browser], killed: str) -> None:
    """The lock of a killed worker is listed; the node is silent; with the permission to force, it is released and logged."""
    browser = open_browser("expert")
    row = browser.text_of_row(killed)
    assert CLOSE in row and "worker-2@local" in row
    browser.click_in_row(killed, "Release…")
    assert "The worker did not answer." in browser.text(".errornote")
    assert locks.show(site.app, killed), "it was only asked"
    browser.click("Release it anyway")
    told = browser.text(".messagelist .success")
    assert told.startswith("Released: worker-2@local did not answer; held by task ")
    assert told.endswith(f"; key {killed}")
    assert f"{site.address}{LIST}" == browser.url
    assert killed not in browser.text("#result_list")
    assert not locks.show(site.app, killed)
    browser.open(f"{site.address}/admin/")
    assert killed in browser.text("#content-related"), "the recent actions of Django's log"


def test_running_body(site: Site, open_browser: Callable[[str], Browser], running: locks.Lock) -> None:
    """The worker says that it runs the task: who may not force is offered nothing, and the body keeps its lock."""
    browser = ask(open_browser("operator"), running.key)
    assert "The worker says that it runs this task." in browser.text(".errornote")
    assert "You are not permitted to release it anyway." in browser.text("#content")
    assert 0 == browser.count("#content form button")
    browser.click("Back to the list")
    assert running.holder.task_id in browser.text_of_row(running.key)


def test_vanished_body(site: Site, open_browser: Callable[[str], Browser]) -> None:
    """The worker does not run the task: the lock is released when the user has confirmed it."""
    key = site.leave_lock("worker-1@local")
    browser = ask(open_browser("operator"), key)
    assert "The worker says that it does not run this task." in browser.text("#content")
    assert locks.show(site.app, key), "it was only asked"
    browser.click("Back to the list")
    release(browser, key)
    told = browser.text(".messagelist .success")
    assert told.startswith("Released: worker-1@local does not run this task; ")
    assert told.endswith(f"; key {key}")
    assert not locks.show(site.app, key)


def test_viewer(site: Site, open_browser: Callable[[str], Browser]) -> None:
    """Who may only look sees the lock and no button."""
    key = site.leave_lock("worker-1@local")
    browser = open_browser("viewer")
    assert key in browser.text("#result_list")
    assert 0 == browser.count("#result_list button")


def test_picture(site: Site, open_browser: Callable[[str], Browser], killed: str) -> None:
    """The list fits into the documentation: a body that runs and has met a duplicate, a killed one, and a pause."""
    body = site.send(CLOSE, "picture")
    site.lock_of(body)
    site.send(CLOSE, "picture", "again")
    locks.pause(site.app, 3600, task=REPORT, reason="moving the database", by="ann")
    try:
        until(lambda: site.lock_of(body).duplicates, "the duplicate is counted")
        picture = open_browser("root").screenshot()
    finally:
        locks.resume(site.app, task=REPORT)
        site.end("picture")
    assert (b"\x89PNG", True) == (picture[:4], len(picture) < 200_000)
    if path := os.environ.get("DJANGO_PICTURE"):
        Path(path).write_bytes(picture)


# -- permissions -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [LIST, STATISTICS, RELEASE])
def test_login(site: Site, path: str) -> None:
    """Who is not logged in is sent to the login."""
    client = site.client()
    answers = client.get(path), client.post(path, key=site.key(CLOSE, "x"))
    assert [(302, f"/admin/login/?next={path}")] * 2 == [(answer.status, answer.target) for answer in answers]


@pytest.mark.parametrize(
    ("user", "pages", "release", "force"),
    [
        ("nobody", 403, 403, 403),
        ("blind", 403, 403, 403),
        ("viewer", 200, 403, 403),
        ("operator", 200, 302, 403),
        ("expert", 200, 302, 302),
        ("root", 200, 302, 302),
    ],
)
def test_permissions(site: Site, user: str, pages: int, release: int, force: int) -> None:
    """Each permission allows what its name says; to release a lock, one must see it."""
    client = site.client(user)
    assert [pages] * 2 == [client.get(path).status for path in (LIST, STATISTICS)]
    for verb, node, status in (("release", "worker-1@local", release), ("force", "gworker-1@local", force)):
        key = site.leave_lock(node)
        answers = "did not answer" if verb == "release" and status != 403 else "nothing"
        answer = until(
            lambda: answers not in (found := client.post(RELEASE, key=key, verb=verb)).text and found,  # noqa: B023
            "the worker answers in time",
        )
        assert status == answer.status
        assert (status == 302) is (not locks.show(site.app, key))
    assert (pages == 200) is ("Singleton locks" in client.get("/admin/").text)


def test_buttons(site: Site) -> None:
    """Who may not release locks is shown no button for it."""
    key = site.leave_lock("worker-1@local")
    pages = {user: site.client(user).get(LIST, q=key).text for user in ("viewer", "operator")}
    assert {"viewer": False, "operator": True} == {user: '<button name="key"' in page for user, page in pages.items()}


def test_csrf(site: Site) -> None:
    """A form of another site releases nothing."""
    key = site.leave_lock("worker-1@local")
    for form in ({"key": key, "verb": "release"}, {"key": key, "verb": "force"}, {"resume": key, "verb": "resume"}):
        assert 403 == site.client("root").post_bare(RELEASE, **form).status
    assert locks.show(site.app, key)


def test_get_changes_nothing(site: Site) -> None:
    """A link releases nothing, and leads to the list without an error."""
    key = site.leave_lock("worker-1@local")
    client = site.client("root")
    answer = client.get(RELEASE, key=key, verb="force")
    assert (302, LIST) == (answer.status, answer.target)
    assert "messagelist" not in client.get(LIST).text
    assert locks.show(site.app, key)


# -- what the pages do -------------------------------------------------------------------------


def test_other_verb(site: Site) -> None:
    """A verb that does not exist only asks."""
    key = site.leave_lock("worker-1@local")
    client = site.client("root")
    until(lambda: "does not run this task" in client.post(RELEASE, key=key, verb="").text, "the worker answers in time")
    assert locks.show(site.app, key)


def test_another_holder(site: Site) -> None:
    """What was confirmed for one task is not done to another one, which holds the lock by now."""
    key, client = site.leave_lock("worker-1@local", task_id="newcomer"), site.client("root")
    for verb in ("release", "force"):
        assert 302 == client.post(RELEASE, key=key, verb=verb, task_id="vanished").status
        page = client.get(LIST).text
        assert all(text in page for text in (">Changed: ", f"; key {key}<"))
    assert locks.show(site.app, key)


def test_body_that_may_hang(site: Site) -> None:
    """A lock that only a supervisor renews is shown as "hung?", with the time since the body's own process has renewed it."""
    key, client = site.leave_lock("worker-1@local", task_id="stopped"), site.client("root")
    page = client.get(LIST, q=key).text
    assert (True, True, False) == ("<td>running</td>" in page, " ago</div>" in page, "hung?" in page)
    with Redis.from_url(site.redis.url()) as store:
        store.hset(key, "ttl", "0")
    assert "<td>hung?</td>" in client.get(LIST, q=key).text
    assert "has not renewed the lock for " in client.post(RELEASE, key=key).text


def test_free_lock(site: Site) -> None:
    """A lock that is free by now is no error."""
    key, client = site.key(CLOSE, "f" * 32), site.client("root")
    assert 302 == client.post(RELEASE, key=key).status
    assert f"Free: nobody held it; key {key}<" in client.get(LIST).text


def test_no_key(site: Site) -> None:
    """Something that is no key is refused in a message."""
    client = site.client("root")
    for form in ({"key": "nonsense"}, {"resume": "nonsense", "verb": "resume"}):
        assert 302 == client.post(RELEASE, **form).status
        assert "&#x27;nonsense&#x27; is no key of a lock of this app" in client.get(LIST).text


def test_pause(site: Site, open_browser: Callable[[str], Browser]) -> None:
    """An operator's pause of a whole task is listed, and ended by its button when the user has confirmed that."""
    locks.pause(site.app, 60, task=REPORT)
    key, browser = site.key(REPORT, "*"), open_browser("operator")
    assert "paused" in browser.text_of_row(key)
    browser.click_in_row(key, "Resume…")
    assert key in browser.text("#content")
    assert list(locks.find(site.app, REPORT)), "it was only asked"
    browser.click("Back to the list")
    browser.click_in_row(key, "Resume…")
    browser.click("Resume")
    assert browser.text(".messagelist .success").startswith("The pause was ended")
    assert "paused" not in browser.text("#result_list")
    assert [] == [*locks.find(site.app, REPORT)]
    client = site.client("operator")
    client.post(RELEASE, resume=key, verb="resume")
    assert "There is no pause" in client.get(LIST).text


def test_filters_after_an_action(site: Site, open_browser: Callable[[str], Browser]) -> None:
    """After a release, or its cancellation, the list has the filters that it had before."""
    key = site.leave_lock("worker-1@local", task_id="filtered & kept")
    query = "?task=books.tasks.close&node=worker-1%40local&q=filtered+%26+kept"
    browser = open_browser("operator")
    browser.open(f"{site.address}{LIST}{query}")
    ask(browser, key).click("Back to the list")
    assert f"{site.address}{LIST}{query}" == browser.url
    release(browser, key)
    assert f"{site.address}{LIST}{query}" == browser.url
    assert "No locks." in browser.text("#result_list")


@pytest.mark.parametrize("back", ["//elsewhere", "https://elsewhere/", "a=1\r\nX: y", "?"])
def test_filters_lead_nowhere_else(site: Site, back: str) -> None:
    """Whatever a form says of the filters, its answer leads to the list."""
    answer = site.client("root").post(RELEASE, key=site.leave_lock("worker-1@local"), verb="force", back=back)
    assert (302, True) == (answer.status, answer.target.startswith(f"{LIST}?"))
    assert "\n" not in answer.target


def test_all_columns_are_seen(site: Site, open_browser: Callable[[str], Browser]) -> None:
    """In a window of 1400 pixels, no column of a table is outside of it."""
    site.leave_lock("a-long-name-of-a-worker@a-long-name-of-a-host", task_id="0f5e0d6c-4b7d-4c5b-8f0e-7a8d3c6b5a49")
    site.send(REPORT, "June")
    until(lambda: list(locks.history(site.app, REPORT)), "the run has ended")
    browser = open_browser("root")
    browser.resize(1400)
    try:
        for path in (LIST, STATISTICS, f"{STATISTICS}?task={REPORT}"):
            browser.open(f"{site.address}{path}")
            assert 0 == browser.hidden_width("table"), path
    finally:
        browser.resize(1660)


def test_filters(site: Site) -> None:
    """The list can be narrowed to a task, a node, or what contains a text of a log line."""
    one, two = site.leave_lock("left@local", task_id="4711-a"), site.leave_lock("right@local", REPORT)
    client = site.client("viewer")
    for query, shown in (
        ({}, (True, True)),
        ({"task": CLOSE}, (True, False)),
        ({"task": REPORT}, (False, True)),
        ({"node": "left@local"}, (True, False)),
        ({"task": CLOSE, "node": "right@local"}, (False, False)),
        ({"q": one}, (True, False)),
        ({"q": "4711-a"}, (True, False)),
        ({"q": "right@"}, (False, True)),
        ({"task": "unknown"}, (False, False)),
    ):
        page = client.get(LIST, **query).text
        assert shown == (f"{one}</div>" in page, f"{two}</div>" in page), query


def test_pages(site: Site) -> None:
    """Of many locks, a page shows a hundred, and leads to the others of the same filter."""
    for number in range(101):
        site.leave_lock("many@local", name=f"many-{number:03}")
    client = site.client("viewer")
    first, second = client.get(LIST, node="many@local").text, client.get(LIST, node="many@local", p="2").text
    assert (100, 1) == tuple(page.count(">singleton:") for page in (first, second))
    assert 'href="?node=many%40local&amp;p=2"' in first
    assert "page 2 of 2" in second and "101 locks" in second


def test_statistics(site: Site) -> None:
    """The statistics show each task; those of one task also its last runs, with the error."""
    site.send(REPORT, "May")
    client = site.client("viewer")
    page = until(
        lambda: "ValueError" in (text := client.get(STATISTICS, task=REPORT).text) and text, "the run is shown"
    )
    assert "no &lt;b&gt;figures&lt;/b&gt; of May" in page
    assert "worker-1@local" in page
    assert "<td>failure</td>" in page
    assert '<th scope="row">released:failure</th>' in page
    assert f'<a href="?task={REPORT}">' in client.get(STATISTICS).text


def test_foreign_text(site: Site) -> None:
    """What others wrote into a lock is shown as text, on each page."""
    evil = "<script>alert(1)</script>"
    key, client = site.leave_lock(f"{evil}@local", task_id=evil), site.client("root")
    pages = [client.get(LIST, q=evil), client.post(RELEASE, key=key), client.get(STATISTICS, task=evil)]
    assert 302 == client.post(RELEASE, key=evil).status, "no key"
    pages.append(client.get("/admin/"))
    assert 302 == client.post(RELEASE, key=key, verb="force").status
    pages.append(client.get(LIST, q=evil, task=evil, node=evil))
    for page in pages:
        assert 200 == page.status
        assert evil not in page.text
        assert "&lt;script&gt;alert(1)" in page.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("CELERY_SINGLETON_LOCK_URL = 'redis://127.0.0.1:{port}/0'", "The store of locks: "),
        ("CELERY_SINGLETON_LOCK_TLL = 5", "Configuration: setting CELERY_SINGLETON_LOCK_TLL: "),
    ],
)
def test_store_away(site: Site, line: str, said: str) -> None:
    """Without the store, or with wrong settings, each page says so, and none fails."""
    path = site.project.directory / "shop" / f"{secrets.token_hex(4)}.py"
    path.write_text(f"from shop.settings import *\n{line.format(port=free_port())}\n")
    with served(site.project, f"shop.{path.stem}") as address:
        client = WebClient(address, "root", PASSWORD)
        for page in (client.get(LIST), client.get(STATISTICS)):
            assert (200, True) == (page.status, said in page.text), page.text
        for form in ({"key": site.key(CLOSE, "0" * 32)}, {"resume": site.key(CLOSE, "*"), "verb": "resume"}):
            assert 302 == client.post(RELEASE, **form).status
            assert said in client.get("/admin/").text


def test_broker_away(site: Site) -> None:
    """Without the broker, the page does not blame the worker, and offers to ask again instead of a release."""
    path = site.project.directory / "shop" / f"{secrets.token_hex(4)}.py"
    path.write_text(f"from shop.settings import *\nCELERY_BROKER_URL = 'redis://127.0.0.1:{free_port()}/0'\n")
    key = site.leave_lock("worker-1@local")
    with served(site.project, f"shop.{path.stem}") as address:
        page = WebClient(address, "root", PASSWORD).post(RELEASE, key=key)
    assert (200, True) == (page.status, "The broker could not be reached, so the worker was not asked." in page.text)
    assert (True, False, False) == tuple(text in page.text for text in (">Ask again<", "did not answer", ">Release it"))
    assert locks.show(site.app, key)


# -- the project -------------------------------------------------------------------------------


def test_no_table(site: Site) -> None:
    """The model needs no table and no migration: Django's commands that go through all models work."""
    tables = site.project.manage("inspectdb")
    assert 0 == tables.returncode and "celery_singleton_lock" not in tables.stdout
    assert "No changes detected" in site.project.manage("makemigrations", "--check").stdout
    for options in ((), ("--all",)):
        dumped = site.project.manage("dumpdata", *options, "--format", "json")
        assert 0 == dumped.returncode, dumped.stderr
        assert '"codename": "force_release_lock"' in dumped.stdout
    assert "no issues" in site.project.manage("check").stdout


def test_command(site: Site) -> None:
    """Celery's command finds the locks of a Django project by its app: Django needs no command of ours."""
    key = site.leave_lock("worker-1@local")
    assert "held by task vanished on worker-1@local (pid 4711," in site.project.celery("singleton", "show", key).stdout
    released = "released: worker-1@local does not run this task"
    until(lambda: released in site.project.celery("singleton", "release", key).stdout, "the worker answers in time")
