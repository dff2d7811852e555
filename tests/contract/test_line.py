"""The promises of every store about the line of messages that wait for a lock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_singleton_lock.max_starts import MaxStarts
from celery_singleton_lock.store.keys import LINE_TOKEN, queued_token
from celery_singleton_lock.store.protocol import AcquireResult, AcquireStatus, Released
from celery_singleton_lock.store.requests import AfterRelease, LeaseSpec, Place
from tests.contract.conftest import Backing

MakeRequest = Callable[..., LeaseSpec]
GRANTED, REFUSED, DROPPED, SUPERSEDED = (
    AcquireStatus.GRANTED,
    AcquireStatus.REFUSED,
    AcquireStatus.DROPPED,
    AcquireStatus.SUPERSEDED,
)


class Deliveries:
    """Deliveries of messages with one lock key, which the test starts, lets wait and ends."""

    def __init__(self, backing: Backing, lease_request: MakeRequest) -> None:
        self.store = backing.store
        self._make = lease_request

    def request(self, name: str, place: Place | None, **more: object) -> LeaseSpec:
        return self._make(task_id=name, place=place, **{"ttl": 20.0, **more})

    def acquire(
        self, name: str, ticket: str = "", copy: float = 0.0, **more: object
    ) -> tuple[LeaseSpec, AcquireResult]:
        """Deliver a copy of a message."""
        spec = self.request(name, Place(ticket, copy, identity=f"ticket {name}"), **more)
        return spec, self.store.acquire(spec)

    def copy(self, name: str, copy: float) -> AcquireResult:
        """Deliver a delayed copy."""
        return self.acquire(name, f"ticket {name}", copy, token=LINE_TOKEN, queued=True)[1]

    def join(
        self,
        name: str,
        copy: float = 0.0,
        room: int = 9,
        replace: bool = False,
        text: str = "?",
        gives_way: bool = True,
    ) -> AcquireResult:
        """Let a message wait; its ticket is its name, and its text what starts it."""
        text = f"message {name}" if text == "?" else text
        place = Place(f"ticket {name}", copy, room, replace, copy + 1.5, 40.0, text, gives_way=gives_way)
        place = place._replace(identity=place.ticket)
        return self.store.acquire(self.request(name, place))

    def held(self, name: str = "holder") -> LeaseSpec:
        spec, result = self.acquire(name)
        assert result.status is GRANTED
        return spec


@pytest.fixture
def deliveries(backing: Backing, lease_request: MakeRequest) -> Deliveries:
    return Deliveries(backing, lease_request)


def test_free_lock_without_a_line(deliveries: Deliveries) -> None:
    """A lock that nobody waits for is granted to a newcomer; its release says that nobody waits."""
    assert deliveries.store.release(deliveries.held(), success=True) == Released()


def test_line_in_order(deliveries: Deliveries) -> None:
    """The end of each holder reserves the lock for the head of the line and names its message, until the line is empty."""
    holder, ran = deliveries.held(), []
    for name in "abc":
        result = deliveries.join(name)
        assert (REFUSED, True) == (result.status, result.is_waiting)
        assert "a" == result.head
    for name in "abc":
        ran.append(deliveries.store.release(holder, success=True).message)
        reserved = deliveries.store.holder(holder.lock)
        assert reserved is not None
        assert (name, "queued") == (reserved.task_id, reserved.state)
        holder, result = deliveries.acquire(name, f"ticket {name}", 0.5)
        assert result.status is GRANTED
    assert ["message a", "message b", "message c"] == ran
    assert deliveries.store.release(holder, success=True) == Released()
    assert deliveries.store.holder(holder.lock) is None


def test_repeated_release(deliveries: Deliveries) -> None:
    """A release that is sent again names nobody: the message that the first one has named may be published already."""
    first = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert "message a" == deliveries.store.release(first, success=True).message
    assert "" == deliveries.store.release(first, success=True).message
    second, _ = deliveries.acquire("a", "ticket a", 1.5)
    assert "" == deliveries.store.release(first, success=True).message
    assert "message b" == deliveries.store.release(second, success=True).message


def test_copy_of_a_named_message(backing: Backing, deliveries: Deliveries) -> None:
    """A copy does not publish its message, if a release has named it; it does so once the message has not come in its turn."""
    holder = deliveries.held()
    deliveries.join("a")
    assert "message a" == deliveries.store.release(holder, success=True).message
    assert REFUSED is deliveries.acquire("a", "ticket a", 1.5, token=LINE_TOKEN, queued=True)[1].status
    backing.wait(21)
    assert GRANTED is deliveries.acquire("a", "ticket a", 1.5, token=LINE_TOKEN, queued=True)[1].status


def test_newcomers_do_not_overtake(deliveries: Deliveries) -> None:
    """Between the holder's end and the head's start, neither a newcomer nor another one in line gets the lock."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    deliveries.store.release(holder, success=True)
    for _ in range(2):
        _, newcomer = deliveries.acquire("n")
        second = deliveries.copy("b", 1.5)
        outsider = deliveries.store.acquire(deliveries.request("o", None))
        assert [REFUSED, REFUSED, REFUSED] == [newcomer.status, second.status, outsider.status]
        assert (2, "a", False, True) == (newcomer.waiting, newcomer.head, newcomer.is_waiting, second.is_waiting)
        assert (2, 1) == (newcomer.ahead, second.ahead)
    _, head = deliveries.acquire("a", "ticket a", 0.5)
    assert head.status is GRANTED


def test_line_without_holder(backing: Backing, deliveries: Deliveries) -> None:
    """After a holder's death only the head of the line gets the lock; a newcomer is told who that is."""
    deliveries.held()
    backing.wait(5)
    deliveries.join("a")
    backing.wait(16)
    _, newcomer = deliveries.acquire("n")
    assert (REFUSED, "a") == (newcomer.status, newcomer.holder.task_id if newcomer.holder else "")
    _, head = deliveries.acquire("a", "ticket a", 1.5)
    assert head.status is GRANTED


def test_copies_of_a_started_message(backing: Backing, deliveries: Deliveries) -> None:
    """Once a copy has started its message, other copies are dropped, also after its end; the same one may be delivered again."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    started, result = deliveries.acquire("a", "ticket a", 0.5)
    assert result.status is GRANTED
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    deliveries.store.release(started, success=False)
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    backing.wait(3000)
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    assert GRANTED is deliveries.acquire("a", "ticket a", 0.5)[1].status


def test_message_that_starts_again_may_wait_again(deliveries: Deliveries) -> None:
    """A started message that is delivered again and has to wait is started by a later copy."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    started, _ = deliveries.acquire("a", "ticket a", 0.5)
    deliveries.store.release(started, success=False)
    holder = deliveries.held()
    assert deliveries.join("a", copy=0.5).is_waiting
    deliveries.store.release(holder, success=True)
    assert GRANTED is deliveries.acquire("a", "ticket a", 2.0)[1].status


def test_earlier_copy_of_a_waiting_message(deliveries: Deliveries) -> None:
    """While a message waits, a copy earlier than the next one is dropped; the next one keeps the message's place."""
    deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert DROPPED is deliveries.acquire("a", "ticket a", 0.5)[1].status
    _, again = deliveries.acquire("a", "ticket a", 1.5)
    assert (REFUSED, True, "a") == (again.status, again.is_waiting, again.head)
    result = deliveries.join("a", copy=1.5)
    assert (True, "a", 2) == (result.is_waiting, result.head, result.waiting)


def test_late_head_loses_its_place(backing: Backing, deliveries: Deliveries) -> None:
    """A message whose next copy does not come in time loses its place to the next one, and joins again at the end."""
    holder = deliveries.held()
    deliveries.join("a")
    backing.wait(10)
    deliveries.join("b")
    backing.wait(31)
    backing.store.release(holder, success=True)
    assert GRANTED is deliveries.acquire("b", "ticket b", 1.5)[1].status
    assert REFUSED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    assert deliveries.join("a", copy=1.5).is_waiting


def test_head_that_does_not_start_in_its_turn(backing: Backing, deliveries: Deliveries) -> None:
    """A head that was named and does not start within the TTL loses its place to the next one."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert "message a" == deliveries.store.release(holder, success=True).message
    assert REFUSED is deliveries.copy("b", 1.5).status
    backing.wait(21)
    assert GRANTED is deliveries.copy("b", 1.5).status
    assert GRANTED is deliveries.acquire("b", "ticket b", 2.0)[1].status
    assert REFUSED is deliveries.acquire("a", "ticket a", 0.5)[1].status


def test_message_that_spent_its_turn_in_the_queue(backing: Backing, deliveries: Deliveries) -> None:
    """It starts if no body holds the lock, also in the turn of another one, which is the next, and which a copy has named."""
    holder = deliveries.held()
    for name in "abc":
        deliveries.join(name)
    assert "message a" == deliveries.store.release(holder, success=True).message
    backing.wait(21)
    copies = [deliveries.copy(name, 1.5) for name in "cb"]
    assert [(REFUSED, "message b"), (REFUSED, "")] == [(copy.status, copy.message) for copy in copies]
    first, result = deliveries.acquire("a", "ticket a", 0.5)
    assert result.status is GRANTED
    assert REFUSED is deliveries.acquire("b", "ticket b", 2.0)[1].status
    assert deliveries.join("b", copy=2.0).is_waiting
    assert "message b" == deliveries.store.release(first, success=True).message


def test_late_copies_keep_the_order(backing: Backing, deliveries: Deliveries) -> None:
    """If all copies come late, as after an outage, the first of them has its turn until its message has started."""
    deliveries.held()
    for name in "abc":
        deliveries.join(name)
    backing.wait(41)
    for _ in range(2):
        assert [GRANTED, REFUSED, REFUSED] == [deliveries.copy(name, 1.5).status for name in "abc"]
    backing.wait(19)
    assert [REFUSED, REFUSED] == [deliveries.copy(name, 1.5).status for name in "bc"]
    assert GRANTED is deliveries.acquire("a", "ticket a", 2.0)[1].status


def test_message_is_named_once(backing: Backing, deliveries: Deliveries) -> None:
    """A message that was named and has not come yet is not named again, as it would run twice."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert "message a" == deliveries.store.release(holder, success=True).message
    backing.wait(21)
    assert GRANTED is deliveries.copy("b", 1.5).status
    first, _ = deliveries.acquire("a", "ticket a", 0.5)
    assert deliveries.join("b", copy=2.0).is_waiting
    deliveries.join("c")
    assert "message b" == deliveries.store.release(first, success=True).message
    again, result = deliveries.acquire("c", "ticket c", 0.5)
    assert result.status is GRANTED  # it was published, as after a late copy
    assert "" == deliveries.store.release(again, success=True).message
    assert REFUSED is deliveries.acquire("n")[1].status
    assert GRANTED is deliveries.acquire("b", "ticket b", 2.5)[1].status


@pytest.mark.parametrize("identity", ["ticket a", ""])
def test_nobody_is_skipped_for_a_running_message(deliveries: Deliveries, identity: str) -> None:
    """A message that is delivered twice has two tickets. When it starts, the other ticket does not go on waiting in the line."""
    assert GRANTED is deliveries.copy("a", 1.5).status
    first = deliveries.request("a", Place(f"{identity}.2", 0.5, identity=identity))
    assert GRANTED is deliveries.store.acquire(first).status
    assert deliveries.join("n", room=1).is_waiting
    assert "message n" == deliveries.store.release(first, success=True).message


class Sharing:
    """Two messages with one task id and other bodies, "one" and "two"; by default a delivery that has not waited."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.store = deliveries.store
        self._request = deliveries.request

    def request(self, which: str, **place: object) -> LeaseSpec:
        more = {"token": LINE_TOKEN, "queued": True} if place.pop("is_copy", False) else {}
        return self._request("shared", Place(identity=which)._replace(**place), **more)

    def acquire(self, which: str, **place: object) -> AcquireResult:
        return self.store.acquire(self.request(which, **place))

    def join(self, which: str) -> AcquireResult:
        return self.acquire(which, ticket=f"{which}.0", room=9, next_copy=1.5, due=40.0, message=f"text {which}")

    def copy(self, which: str) -> AcquireResult:
        return self.acquire(which, ticket=f"{which}.0", copy=1.5, is_copy=True)


@pytest.fixture
def sharing(deliveries: Deliveries) -> Sharing:
    return Sharing(deliveries)


def test_two_messages_with_one_task_id(deliveries: Deliveries, sharing: Sharing) -> None:
    """While the first of them runs, the second one waits, and its copy goes on. It is the next one."""
    holder = deliveries.held()
    assert [1, 2] == [sharing.join(message).waiting for message in ("one", "two")]
    assert "text one" == sharing.store.release(holder, success=True).message
    started = sharing.request("one", ticket="one.0", copy=0.5)
    assert GRANTED is sharing.store.acquire(started).status
    waits = sharing.copy("two")
    assert (REFUSED, True, True) == (waits.status, waits.is_waiting, waits.shares_id)
    assert DROPPED is sharing.copy("one").status
    assert (False, "text two") == sharing.store.release(started, success=True)
    assert GRANTED is sharing.acquire("two", ticket="two.0", copy=0.5).status


def test_second_message_with_a_task_id_is_no_redelivery(sharing: Sharing) -> None:
    """A message that joins the line with the holder's task id is told from the holder's, and is no redelivery of that."""
    started = sharing.request("one")
    assert GRANTED is sharing.store.acquire(started).status
    assert [False, True] == [sharing.acquire(message).shares_id for message in ("one", "two")]
    assert sharing.join("two").is_waiting
    assert (True, "text two") == sharing.store.release(started, success=True)


def test_message_whose_task_id_the_head_has(deliveries: Deliveries, sharing: Sharing) -> None:
    """A delivery is told whether its message is the head of the line, and whether the lock is reserved for it."""
    holder = deliveries.held()
    sharing.join("one")
    assert [True, False] == [sharing.acquire(message).is_head for message in ("one", "two")]
    assert "text one" == sharing.store.release(holder, success=True).message
    told = [sharing.acquire(message) for message in ("one", "two")]
    assert [("shared", True, False), ("shared", False, True)] == [
        (one.holder.task_id, one.is_head, one.shares_id) for one in told if one.holder
    ]


def test_holder_that_lost_its_data(backing: Backing, sharing: Sharing) -> None:
    """A holder that has reacquired its lock is taken for any message with its task id."""
    started = sharing.request("one")
    fence = sharing.store.acquire(started).fence
    backing.lose()
    sharing.store.reacquire(started, fence)
    assert [DROPPED, DROPPED] == [sharing.copy(message).status for message in ("one", "two")]


def test_message_whose_identity_is_not_known(sharing: Sharing) -> None:
    """A message whose identity is not known, such as an own retry, is taken for any message with its task id."""
    started = sharing.request("")
    assert GRANTED is sharing.store.acquire(started).status
    assert [False, False] == [sharing.acquire(which).shares_id for which in ("", "two")]


def test_full_line(deliveries: Deliveries) -> None:
    """A message finds no room in a full line, and is told how many wait; those that wait keep their places."""
    deliveries.held()
    assert deliveries.join("a", room=1).is_waiting
    result = deliveries.join("b", room=1)
    assert (REFUSED, False, 1, "a") == (result.status, result.is_waiting, result.waiting, result.head)
    assert deliveries.join("a", copy=1.5, room=1).is_waiting


def test_replacing(deliveries: Deliveries) -> None:
    """A message that replaces those that wait is the only one left; copies of the others are told so."""
    holder = deliveries.held()
    deliveries.join("a", room=1)
    result = deliveries.join("b", room=1, replace=True)
    assert (True, 1, "b") == (result.is_waiting, result.waiting, result.head)
    copied = deliveries.acquire("a", "ticket a", 1.5)[1]
    assert (SUPERSEDED, "b") == (copied.status, copied.head)
    assert "message b" == deliveries.store.release(holder, success=True).message


def test_replacing_itself(deliveries: Deliveries) -> None:
    """If another delivery of a message that waits takes its place, the first one is dropped: the message is not skipped."""
    deliveries.held()
    deliveries.join("a", room=1)
    again = Place("ticket again", 0.0, 1, True, 1.5, 40.0, "message again", gives_way=True)
    assert (True, 1) == (
        (result := deliveries.store.acquire(deliveries.request("a", again))).is_waiting,
        result.waiting,
    )
    assert DROPPED is deliveries.acquire("a", "ticket a", 0.5)[1].status


def test_replacing_a_head_in_its_turn(deliveries: Deliveries) -> None:
    """A message that replaces a head which was named and has not started gets the lock at once."""
    holder = deliveries.held()
    deliveries.join("a", room=1)
    deliveries.store.release(holder, success=True)
    assert GRANTED is deliveries.join("b", room=1, replace=True).status
    copied = deliveries.acquire("a", "ticket a", 0.5)[1]
    assert (SUPERSEDED, "") == (copied.status, copied.head)  # the other one waits no more


def test_joining_when_the_lock_is_free(deliveries: Deliveries) -> None:
    """A message that joins just when the lock became free is granted it, and its delayed copy is dropped."""
    assert GRANTED is deliveries.join("a").status
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status


def test_leaving(deliveries: Deliveries) -> None:
    """A message that has left the line is not named, and its copies are dropped."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    deliveries.store.leave(holder, "ticket a")
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    assert "message b" == deliveries.store.release(holder, success=True).message


def test_named_message_leaves(deliveries: Deliveries) -> None:
    """If a message leaves in its turn, as it is revoked, the next one is named."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert "message a" == deliveries.store.release(holder, success=True).message
    assert "" == deliveries.store.leave(holder, "ticket b")
    deliveries.join("c")
    assert "message c" == deliveries.store.leave(holder, "ticket a")
    assert "" == deliveries.store.leave(holder, "ticket a")
    assert GRANTED is deliveries.acquire("c", "ticket c", 0.5)[1].status


def test_last_one_leaves(deliveries: Deliveries) -> None:
    """If the only message leaves in its turn, the lock is free."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    assert "" == deliveries.store.leave(holder, "ticket a")
    assert deliveries.store.holder(holder.lock) is None


def test_leaving_while_the_lock_is_held(deliveries: Deliveries) -> None:
    """Nobody is named while somebody holds the lock."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    assert "" == deliveries.store.leave(holder, "ticket a")
    assert REFUSED is deliveries.acquire("b", "ticket b", 1.5)[1].status


def test_copy_that_leaves_in_its_turn(deliveries: Deliveries) -> None:
    """A copy that got the lock for its message, which has expired, passes it on to the next one."""
    holder = deliveries.held()
    deliveries.join("a", text="")
    deliveries.join("b")
    assert "" == deliveries.store.release(holder, success=True).message
    assert GRANTED is deliveries.copy("a", 1.5).status
    assert "message b" == deliveries.store.leave(holder, "ticket a")
    assert REFUSED is deliveries.acquire("n")[1].status
    assert GRANTED is deliveries.acquire("b", "ticket b", 0.5)[1].status


def test_all_have_left(deliveries: Deliveries) -> None:
    """If all messages have left the line before the holder's end, the lock is free after it."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.leave(holder, "ticket a")
    assert "" == deliveries.store.release(holder, success=True).message
    assert deliveries.store.holder(holder.lock) is None


def test_message_without_text(deliveries: Deliveries) -> None:
    """A head that only its copy can start is not named: the lock is free, for the head alone."""
    holder = deliveries.held()
    deliveries.join("a", text="")
    assert "" == deliveries.store.release(holder, success=True).message
    assert REFUSED is deliveries.acquire("n")[1].status
    assert GRANTED is deliveries.acquire("a", "ticket a", 1.5)[1].status


@pytest.mark.parametrize("supervised", [False, True])
def test_release_by_token(deliveries: Deliveries, supervised: bool, lease_request: MakeRequest) -> None:
    """The release for a dead child, which knows the token alone, reserves the lock for the head of the line."""
    holder, result = deliveries.acquire("holder", supervised=supervised)
    assert result.status is GRANTED
    deliveries.join("a")
    known = lease_request(digest="" if supervised else "d", token=holder.token, task_id="holder")
    assert "message a" == deliveries.store.release(known, success=False).message
    assert REFUSED is deliveries.acquire("n")[1].status
    assert GRANTED is deliveries.acquire("a", "ticket a", 1.5)[1].status


def test_revoked_turn(deliveries: Deliveries, base: str) -> None:
    """Revoking a lock that is reserved for the line frees it, and keeps nobody in line from starting."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    deliveries.store.revoke(base, holder.lock)
    reserved = deliveries.request("a", Place("ticket a", 1.5), token=LINE_TOKEN, queued=True)
    assert deliveries.store.acquire(reserved).status is GRANTED
    assert GRANTED is deliveries.acquire("a", "ticket a", 2.0)[1].status


def test_own_retry_comes_before_the_line(deliveries: Deliveries) -> None:
    """A lease that ends as its task's own reservation names nobody; the head of the line is named after the retry."""
    holder = deliveries.held()
    deliveries.join("a")
    kept = AfterRelease("queued", 100.0, queued_token("holder"))
    assert deliveries.store.release(holder, False, None, kept) == Released()
    assert REFUSED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    again = deliveries.request("holder", None)
    assert deliveries.store.acquire(again).status is GRANTED
    assert "message a" == deliveries.store.release(again, success=True).message


def test_redelivery_and_line(deliveries: Deliveries) -> None:
    """A release tells of a redelivery that waits for the outcome as well as of the line."""
    holder = deliveries.held()
    deliveries.join("a")
    second = deliveries.request("holder", None, redelivered=True)
    assert deliveries.store.acquire(second).status is REFUSED
    assert deliveries.store.release(holder, success=True) == Released(redelivery_waits=True, message="message a")


@pytest.mark.parametrize("starts", ["a", "b"])
def test_copy_between_naming_and_start(deliveries: Deliveries, starts: str) -> None:
    """A copy of a message that was named is no redelivery: neither the message nor one that replaces it ends as if one waited."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    assert REFUSED is deliveries.copy("a", 1.5).status
    started = deliveries.request(starts, Place(f"ticket {starts}", 0.5, room=1, replace=True))
    assert deliveries.store.acquire(started).status is GRANTED
    assert deliveries.store.release(started, success=True) == Released()


def test_late_copy_after_an_own_retry(deliveries: Deliveries) -> None:
    """A late copy of a started message is dropped, also while the lock is reserved for the message's own retry."""
    started, result = deliveries.acquire("a", "ticket a", 0.5)
    assert result.status is GRANTED
    deliveries.store.release(started, False, None, AfterRelease("queued", 100.0, queued_token("a")))
    assert DROPPED is deliveries.copy("a", 1.5).status
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status


def test_started_message_leaves(deliveries: Deliveries) -> None:
    """If a message leaves that has started, the copy that started it may still be delivered again; others are dropped."""
    started, _ = deliveries.acquire("a", "ticket a", 0.5)
    deliveries.store.release(started, success=False)
    deliveries.store.leave(started, "ticket a")
    assert DROPPED is deliveries.acquire("a", "ticket a", 1.5)[1].status
    assert GRANTED is deliveries.acquire("a", "ticket a", 0.5)[1].status


def test_late_head_of_a_superseded_message(backing: Backing, deliveries: Deliveries) -> None:
    """A superseded message is told who waits instead, also if that one's copy is late."""
    deliveries.held()
    deliveries.join("a", room=1)
    assert deliveries.join("b", room=1, replace=True).is_waiting
    backing.wait(41)
    result = deliveries.acquire("a", "ticket a", 1.5)[1]
    assert (SUPERSEDED, "b") == (result.status, result.head)


def test_start_from_a_reservation(deliveries: Deliveries) -> None:
    """A message of the line that starts from a reservation has its other copies dropped, and its end names the next one."""
    reserved = deliveries.request("a", Place(), token=queued_token("a"), queued=True)
    assert deliveries.store.acquire(reserved).status is GRANTED
    assert deliveries.join("b").is_waiting
    started, result = deliveries.acquire("a", "ticket a", 0.5)
    assert result.status is GRANTED
    assert "message b" == deliveries.store.release(started, success=True).message
    assert DROPPED is deliveries.copy("a", 1.5).status


def test_store_that_lost_its_line(backing: Backing, deliveries: Deliveries) -> None:
    """After a loss of data each copy joins again, or starts if the lock is free; no message needs the line to run."""
    deliveries.held()
    deliveries.join("a")
    deliveries.join("b")
    backing.lose()
    started, result = deliveries.acquire("a", "ticket a", 1.5)
    assert result.status is GRANTED
    assert deliveries.join("b", copy=1.5).is_waiting
    assert "message b" == deliveries.store.release(started, success=True).message


def test_nothing_is_left(backing: Backing, deliveries: Deliveries, base: str) -> None:
    """Every key of a line expires."""
    holder = deliveries.held()
    deliveries.join("a")
    deliveries.store.release(holder, success=True)
    started, _ = deliveries.acquire("a", "ticket a", 0.5)
    deliveries.store.release(started, success=True)
    kept = [name for name in backing.keys() if ":fence" not in name]  # noqa: SIM118
    assert all(backing.lives(name) <= 3600 for name in kept)
    assert not any(":line:" in name or ":waiting:" in name for name in kept)


def test_message_that_gives_way_to_nobody(deliveries: Deliveries) -> None:
    """A newcomer that takes a place takes that of a message that gives way, and no other; it waits behind the rest."""
    holder = deliveries.held()
    deliveries.join("a", gives_way=False)
    deliveries.join("b", room=1, replace=True)
    deliveries.join("c", gives_way=False)
    latest = deliveries.join("d", room=1, replace=True)
    assert (3, 2, True) == (latest.waiting, latest.ahead, latest.is_waiting)
    superseded = deliveries.copy("b", 1.5)
    assert (SUPERSEDED, "d") == (superseded.status, superseded.head)
    ran = []
    for name in "acd":
        ran.append(deliveries.store.release(holder, success=True).message)
        holder, _ = deliveries.acquire(name, f"ticket {name}", 0.5)
    assert ["message a", "message c", "message d"] == ran
    assert deliveries.store.release(holder, success=True) == Released()


@pytest.mark.parametrize("who", ["newcomer", "copy", "joining"])
def test_free_lock_and_messages_that_wait(backing: Backing, deliveries: Deliveries, who: str) -> None:
    """Whoever finds the lock free, as its holder has died, is told the message of the first in line, once."""
    deliveries.held()
    for name in "abc":
        deliveries.join(name)
    backing.wait(200)  # no copy has come: they have their places all the same
    ask = {
        "newcomer": lambda: deliveries.acquire("n")[1],
        "copy": lambda: deliveries.copy("b", 1.5),
        "joining": lambda: deliveries.join("n"),
    }[who]
    first, second = ask(), ask()
    assert [(REFUSED, "message a"), (REFUSED, "")] == [(one.status, one.message) for one in (first, second)]
    assert (REFUSED, "") == ((again := deliveries.copy("a", 1.5)).status, again.message)
    started, result = deliveries.acquire("a", "ticket a", 0.5)
    assert result.status is GRANTED
    assert "message b" == deliveries.store.release(started, success=True).message


def test_publisher_that_finds_the_lock_free(backing: Backing, deliveries: Deliveries) -> None:
    """A publisher that wants a reservation is told no message: it publishes its own alone."""
    deliveries.held()
    deliveries.join("a")
    backing.wait(21)
    _, result = deliveries.acquire("n", token=queued_token("n"), queued=True)
    assert (REFUSED, "") == (result.status, result.message)
    assert "message a" == deliveries.acquire("n")[1].message


def test_turn_that_is_given_back(deliveries: Deliveries) -> None:
    """A message that could not be published has its turn again at once, with its new text, by its copy or by anybody."""
    holder = deliveries.held()
    for name in "ab":
        deliveries.join(name)
    for number in range(2):
        named = deliveries.store.release(holder, success=True).message or deliveries.acquire("n")[1].message
        assert (f"again {number - 1}" if number else "message a") == named
        deliveries.store.give_back(holder, "ticket a", f"again {number}")
        assert deliveries.store.holder(holder.lock) is None
    assert GRANTED is deliveries.copy("a", 1.5).status
    deliveries.store.give_back(holder, "ticket a", "by its copy")
    assert (REFUSED, "by its copy") == ((other := deliveries.copy("b", 1.5)).status, other.message)
    started, result = deliveries.acquire("a", "ticket a", 2.0)
    assert result.status is GRANTED
    deliveries.store.give_back(holder, "ticket a", "later")
    assert "message b" == deliveries.store.release(started, success=True).message


def test_head_that_may_not_start(deliveries: Deliveries) -> None:
    """If the first in line was started too often, the next one is named when it leaves the line."""
    limit = MaxStarts(1)
    holder, _ = deliveries.acquire("holder", max_starts=limit, supervised=True)
    for name in "ab":
        deliveries.join(name)
    died = replace(holder, digest="", max_starts=None, place=None)  # as its supervisor says
    assert "message a" == deliveries.store.release(died, success=False).message
    refused, result = deliveries.acquire("a", "ticket a", 0.5, max_starts=limit)
    assert result.status is AcquireStatus.TOO_MANY_STARTS
    assert "message b" == deliveries.store.leave(refused, "ticket a")


def test_newest_that_lost_its_place(backing: Backing, deliveries: Deliveries) -> None:
    """A message that has lost its place, and that its copy publishes, is not superseded: no newcomer takes its place any more."""
    holder = deliveries.held()
    deliveries.join("a", room=1)
    deliveries.store.release(holder, success=True)
    backing.wait(41)
    other, result = deliveries.acquire("b")  # it removes what is late
    assert (GRANTED, 0) == (result.status, deliveries.acquire("n")[1].waiting)
    deliveries.store.release(other, success=True)
    assert GRANTED is deliveries.copy("a", 1.5).status
    assert REFUSED is deliveries.join("c", room=1, replace=True).status
    assert GRANTED is deliveries.acquire("a", "ticket a", 2.0)[1].status
