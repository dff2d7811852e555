"""Removes one mechanism at a time from a copy of the package, and runs the row that tests it: that row must fail.

Before that, each of these rows must pass in an unchanged copy.

``python -m tests.faults.mutants [NAME ...]``
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.faults.harness import WorkerFailed
from tests.servers import new_directory, remove_directory

ROOT = Path(__file__).parents[2]
PACKAGE = "celery_singleton_lock"
LANES = 2
GREEN, RED = "green", "red"


@dataclass(frozen=True)
class Mutant:
    """One removed mechanism.

    Arguments:
        name: of the mechanism.
        file: its path within the package.
        old: text that must occur exactly once.
        new: its replacement.
        row: the test that must fail, in pytest's spelling: of the matrix, or of another directory of ``tests/``.
        shows: a pattern that the test's failure must match.
    """

    name: str
    file: str
    old: str
    new: str
    row: str
    shows: str


#: Code with which a hook of a request releases its lease in the main process.
_RELEASE = """\
        self.supervisor._renewer._store.release(self._lease_request(0), success=False)

"""

MUTANTS = (
    Mutant(
        "owner check at release",
        "store/redis/release.lua",
        "if holder[1] ~= ARGV[1] then -- another's",
        "if not holder[1] then -- another's",
        "test_stopped_processes.py::test_over_at_waking",
        "has no lease|theft|overlap",
    ),
    Mutant(
        "owner check at renewal",
        "store/redis/renew.lua",
        "if owner == token then",
        "if owner then",
        "test_stopped_processes.py::test_whole_worker[threads]",
        "ensure failed|theft|overlap",
    ),
    Mutant(
        "renewal in the process of the body",
        "renewal/renewer.py",
        "            self._renew(active[start : start + BATCH])",
        "            pass",
        "test_shutdowns.py::test_warm[threads]",
        "freed after the body|overlap|lost|early",
    ),
    Mutant(
        "renewal in the child",
        "renewal/renewer.py",
        "            self._renew(active[start : start + BATCH])",
        "            pass",
        "test_renewal_errors.py::test_renewal_goes_on[prefork-RuntimeError]",
        "renews no more|lost",
    ),
    Mutant(
        "renewal by the main process",
        "worker/supervisor.py",
        "        self._renewer.add(lease)\n",
        "",
        "test_kept_gil.py::test_regex",
        "overlap|lost|early",
    ),
    Mutant(
        "release by the main process",
        "worker/supervisor.py",
        "        self._renewer.release_later(pending)",
        "        pass",
        "test_killed_child.py::test_killed_child[redis]",
        "lease freed|is gone",
    ),
    Mutant(
        "release only once the child is reaped",
        "worker/request.py",
        "    def is_unfinished(self: Any) -> bool:\n",
        "    def on_timeout(self: Any, soft: bool, timeout: float) -> None:\n"
        "        super().on_timeout(soft, timeout)\n" + _RELEASE + "    def is_unfinished(self: Any) -> bool:\n",
        "test_time_limits.py::test_limits",
        "freed under the body|freed after the body|early",
    ),
    Mutant(
        "nothing is released when a revocation is told",
        "worker/request.py",
        "    def is_unfinished(self: Any) -> bool:\n",
        "    def terminate(self: Any, pool: Any, signal: Any = None) -> None:\n"
        "        super().terminate(pool, signal)\n" + _RELEASE + "    def is_unfinished(self: Any) -> bool:\n",
        "test_revocation.py::test_swallowed[prefork]",
        "overlap|early|freed after the body",
    ),
    Mutant(
        "the next in line is published after a pending release",
        "renewal/pending.py",
        "            self.publish(message)\n",
        "            pass\n",
        "tests/overlap/test_line.py::test_killed_holder",
        "timed out|TimeoutError",
    ),
    Mutant(
        "the main process lets go of a dead child",
        "worker/supervisor.py",
        "        self._renewer.remove(lease)\n        self._renewer.release_later",
        "        lease.is_active = lambda time: True\n        self._renewer.release_later",
        "test_kept_gil.py::test_renewal_ends_with_the_child",
        "assert",
    ),
    Mutant(
        "same task id is no duplicate",
        "worker/duplicates.py",
        "    if holder.task_id == attempt.request.id and not attempt.request.is_eager:",
        "    if False:",
        "test_redelivery.py::test_no_duplicate_of_itself",
        "next .*late-skip|'what': 'duplicate'",
    ),
    Mutant(
        "a copy of a message that succeeded is dropped",
        "store/redis/acquire.lua",
        "if completed == 'success' then return {'completed'} end\n",
        "",
        "test_redelivery.py::test_first_succeeds",
        "no copy is left|bodies began",  # redeliveries wait forever
    ),
    Mutant(
        "a lock that another has is refused",
        "store/redis/acquire.lua",
        "if owner and owner ~= ARGV[1] then",
        "if false then",
        "test_many_duplicates.py::test_storm[skip]",
        "duplicates",
    ),
    Mutant(
        "idempotent acquire",
        "store/redis/acquire.lua",
        "if owner and owner ~= ARGV[1] then",
        "if owner then",
        "test_store_faults.py::test_reply_lost[prefork-0]",
        "a0 starts|a0 .*started: |reply to acquire lost",
    ),
    Mutant(
        "deadline counted from before sending",
        "renewal/body.py",
        "            lease.renewed(sent_at)\n            self._events.renewed(lease)",
        "            lease.renewed(self._clock())\n            self._events.renewed(lease)",
        "test_store_faults.py::test_renewal_answered_late",
        "not held any more",
    ),
    Mutant(
        "native thread under gevent",
        "native.py",
        '    if library == "gevent":\n        return',
        '    if library == "gevent?":\n        return',
        "test_kept_gil.py::test_never_yields[gevent]",
        "overlap|lost|early",
    ),
    Mutant(
        "native thread under eventlet",
        "native.py",
        '    if library == "eventlet":\n        return',
        '    if library == "eventlet?":\n        return',
        "test_kept_gil.py::test_never_yields[eventlet]",
        "overlap|lost|early",
    ),
    Mutant(
        "a script that the store has forgotten is sent again",
        "store/redis/store.py",
        "            return self._pool.execute(call.with_text(), deadline, once)",
        "            from celery_singleton_lock.errors import StoreUnavailable\n\n"
        '            raise StoreUnavailable("forgotten") from None',  # a worker starts nevertheless
        "test_store_faults.py::test_nothing_lost[prefork-SCRIPT FLUSH]",
        "a starts",
    ),
    Mutant(
        "a command that met a closed connection is sent again",
        "store/redis/connection.py",
        "        if not was_idle:\n            raise\n",
        "        raise\n",
        "test_store_faults.py::test_nothing_lost[prefork-CLIENT KILL TYPE normal]",
        r"assert \[[\d.]+, .* == ",
    ),
    Mutant(
        "a body that lost its lease is interrupted",
        "renewal/body.py",
        "            lease.interrupt.fire()",
        "            pass",
        "test_stopped_processes.py::test_whole_worker_is_interrupted[threads]",
        "ends",
    ),
    Mutant(
        "an error does not end the supervisor's threads",
        "renewal/loop.py",
        "            except BaseException as error:\n",
        "            except BaseException as error:\n                return\n",
        "test_renewal_errors.py::test_watch_goes_on[RuntimeError]",
        "has no lease|early|overlap|goes on",
    ),
    Mutant(
        "an error does not end the renewal thread",
        "renewal/loop.py",
        "            except BaseException as error:\n",
        "            except BaseException as error:\n                return\n",
        "test_renewal_errors.py::test_renewal_goes_on[threads-RuntimeError]",
        "the error is logged|lost|renews no more",
    ),
    Mutant(
        "a lease that the store lost is reacquired",
        "renewal/body.py",
        "            self._reacquire(lease)\n",
        "            pass\n",
        "test_store_faults.py::test_restarted_empty_and_alone[threads]",
        "re-taken|held",
    ),
    Mutant(
        "a former holder learns that another came and went",
        "store/redis/reacquire.lua",
        "local lost = (redis.call('ZSCORE', KEYS[4], KEYS[1]) or 0) + 0 > ARGV[7] + 0",
        "local lost = false",
        "test_store_faults.py::test_restarted_empty_and_a_run[threads-short]",
        "lost",
    ),
    Mutant(
        "what another delivery had is reacquired",
        "renewal/body.py",
        "        if result is RenewResult.REVOKED:\n",
        "        if result in (RenewResult.REVOKED, RenewResult.NOT_OWNER):\n",
        "test_store_faults.py::test_restarted_empty_and_a_run[threads-long]",
        "re-taken",
    ),
    Mutant(
        "release when the body is over",
        "worker/release.py",
        "    state.ended = True\n    renewer.remove(state)\n",
        "    return\n",
        "test_early_ends.py::test_body_leaves",
        "freed after the body|no lease is left|leftover",
    ),
    Mutant(
        "one deadline over a store call",
        "store/redis/connection.py",
        "                self._sock.settimeout(left)\n",
        "                self._sock.settimeout(None)\n",
        "test_store_faults.py::test_half_open",
        "store error",
    ),
    Mutant(
        "a release that failed is repeated",
        "worker/release.py",
        "    if state.reacquired or (state.unreleased and not pending.confirmed):\n",
        "    if False:\n",
        "test_store_faults.py::test_body_ends_while_the_store_is_away",
        "freed|is gone|leftover",
    ),
    Mutant(
        "what an unanswered acquire got is released",
        "worker/release.py",
        "    elif lease.unreleased:  # nobody knows whether the store has granted it\n",
        "    elif False:\n",
        "test_store_faults.py::test_stopped_for_three_ttl",
        "has it again|somebody has it|overlap|leftover|no lease is left",
    ),
    Mutant(
        "a forked process owns nothing",
        "worker/release.py",
        "    if spec.pid != os.getpid():",
        "    if False:",
        "test_forks_and_nesting.py::test_fork_in_a_body[fork-through]",
        "freed after the body|early|overlap|theft|no lease|lost: |late renewal",
    ),
    Mutant(
        "copies of a message that has started are dropped",
        "store/redis/acquire.lua",
        "  redis.call('ZADD', used, now + window, one, now + window, one .. ':' .. by)\n",
        "",
        "test_line_faults.py::test_fifty_and_a_killed_holder",
        r"assert \(50 \+ 1\) ==|runs",
    ),
    Mutant(
        "the lock is for the head of the line alone",
        "store/redis/acquire.lua",
        "is_turn = is_turn and (not head or head == ticket)\n",
        "",
        "test_line_faults.py::test_fifty_and_a_killed_holder",
        r"order|assert \['",
    ),
    Mutant(
        "the earlier of two copies is dropped",
        "store/redis/acquire.lua",
        "  if waits and copy + 0 < (redis.call('HGET', waiting, ticket .. ':copy') or 0) + 0 and room == '' "
        "then return {'dropped'} end\n",
        "",
        "tests/contract/test_line.py::test_earlier_copy_of_a_waiting_message[redis]",
        "DROPPED|dropped",
    ),
    Mutant(
        "a release reserves the lock for the head of the line",
        "store/redis/release.lua",
        "if holder[3] then\n",
        "if false then\n",
        "tests/contract/test_line.py::test_line_in_order[redis]",
        "assert",
    ),
    Mutant(
        "a message that leaves out of its turn names nobody",
        "store/redis/leave.lua",
        "reserved[1] == 'queued:line' and (not reserved[2] or",
        "reserved[1] == 'queued:line' and (true or",
        "tests/contract/test_line.py::test_named_message_leaves[redis]",
        "assert",
    ),
    Mutant(
        "a copy leaves alone what was named",
        "store/redis/acquire.lua",
        "if ARGV[1] == 'queued:line' and owner then is_turn = is_turn and not redis.call('HGET', KEYS[1], 'named') end\n",
        "",
        "tests/contract/test_line.py::test_copy_of_a_named_message[redis]",
        "GRANTED|granted",
    ),
    Mutant(
        "a message in its turn keeps its place",
        "store/redis/acquire.lua",
        "ticket .. ':due', now + ARGV[2], ticket .. ':copy', copy,",
        "ticket .. ':due', 0, ticket .. ':copy', copy,",
        "tests/contract/test_line.py::test_late_copies_keep_the_order[redis]",
        "granted",
    ),
    Mutant(
        "a message is named once",
        "store/redis/_next.lua",
        "now + lasts, head .. ':message', '')",
        "now + lasts)",
        "tests/contract/test_line.py::test_message_is_named_once[redis]",
        "message [ab]",
    ),
    Mutant(
        "what the event loop does not receive is published",
        "line/handover.py",
        "        self._watch.wake(now() + LOOK_INTERVAL)\n",
        "",
        "tests/overlap/test_handover.py::test_soft_shutdown",
        "timed out|TimeoutError",
    ),
    Mutant(
        "a worker without a free process returns a message whose turn has come",
        "line/returning.py",
        "may_return = key[0] and",
        "may_return = False and",
        "tests/overlap/test_copies.py::test_message_for_a_busy_worker[rabbitmq-wait_late-threads]",
        "all have run|assert",
    ),
    Mutant(
        "the end of a body publishes the next in line",
        "worker/release.py",
        "cooldown_until=cooldown, publish=publish)",
        "cooldown_until=cooldown)",
        "test_feature_faults.py::test_features_shutdown[warm]",
        "36 warm shutdown",
    ),
    Mutant(
        "a limit counts the slots",
        "store/redis/acquire.lua",
        "slot_limit + 0",
        "slot_limit + 1",
        "test_limit_faults.py::test_one_holder_killed[child]",
        "duplicate|overlap",
    ),
    Mutant(
        "as many of the first in line as slots are free",
        "store/redis/acquire.lua",
        "  is_turn = rank < free\n",
        "  is_turn = free > 0\n",
        "tests/contract/test_limit_line.py::test_as_many_as_slots_are_free[redis]",
        "assert",
    ),
    Mutant(
        "a message is named once, for one of several slots",
        "store/redis/_next_slot.lua",
        "one .. ':message', '')\n",
        "one .. ':message', fields[2])\n",
        "tests/contract/test_limit_line.py::test_as_many_as_slots_are_free[redis]",
        "assert",
    ),
    Mutant(
        "starts that still run in other slots are no crashes",
        "store/redis/acquire.lua",
        "    too_many = crashed >= start_limit + 0\n",
        "",
        "tests/contract/test_limit.py::test_starts_that_run_are_no_crashes[redis]",
        "assert",
    ),
    Mutant(
        "a message turns its reservation into its lease",
        "store/redis/acquire.lua",
        "  if owner ~= 'queued:' .. ARGV[3] then",
        "  if true then",
        "test_publish_faults.py::test_store_faults_before_the_start",
        "timed out",
    ),
    Mutant(
        "a revoked message frees its reservation",
        "worker/request.py",
        "        free_reservation(app, spec, self.publish_next)",
        "        pass",
        "test_publish_faults.py::test_message_that_never_starts",
        "41 message revoked|revoked is free",
    ),
    Mutant(
        "an own retry keeps the lock",
        "worker/execution.py",
        "        if isinstance(error, Retry):\n"
        "            kept = kept_for_retry(attempt.task, attempt.config, attempt.request, state.spec, error)\n",
        "",
        "tests/integration/test_publish.py::test_own_retry_keeps_the_lock[prefork]",
        "the retry waits",
    ),
    Mutant(
        "a request to stop is for one lease alone",
        "store/redis/acquire.lua",
        "'named', 'redelivered', 'stop')",
        "'named', 'redelivered')",
        "tests/contract/test_replace.py::test_lease_after_one_that_was_asked_to_stop[redis-its turn]",
        "assert",
    ),
    Mutant(
        "a holder's time of grace begins once",
        "store/redis/acquire.lua",
        "  elseif not asked then\n",
        "  else\n",
        "tests/contract/test_replace.py::test_how_long_the_holder_is_asked[redis]",
        "assert 11.99 <",
    ),
    Mutant(
        "a replaced message is not run again",
        "store/redis/acquire.lua",
        "  if ARGV[7] == '1' and is_marked('running:') then return {'replaced'} end\n",
        "",
        "tests/contract/test_replace.py::test_redelivery_of_a_replaced_message[redis]",
        "assert",
    ),
    Mutant(
        "a replaced reservation is remembered",
        "store/redis/acquire.lua",
        "  redis.call('PEXPIRE', replaced, math.max(lasts, redis.call('PTTL', replaced)))\n",
        "  redis.call('PEXPIRE', replaced, 1000)\n",
        "tests/contract/test_replace.py::test_reservation_is_replaced[redis-message]",
        "assert",
    ),
    Mutant(
        "a replaced task is not retried",
        "task.py",
        "            raise exc\n",
        "            pass\n",
        "tests/overlap/test_replace.py::test_autoretry[prefork]",
        "REVOKED",
    ),
    Mutant(
        "a holder that is replaced keeps its lock until its body is over",
        "store/redis/acquire.lua",
        "  if holder[7] then\n",
        "  if true then\n",
        "tests/overlap/test_replace.py::test_lock_is_kept_until_the_end[prefork]",
        "the newcomer waits|assert",
    ),
    Mutant(
        "a holder looks each second whether it is to stop",
        "lease.py",
        "        return min(interval, STOP_INTERVAL) if self.spec.stoppable else interval\n",
        "        return interval\n",
        "tests/overlap/test_replace.py::test_cooperative_body[prefork]",
        "timed out|assert",
    ),
    Mutant(
        "a holder that goes on past its time of grace is terminated",
        "policies/replace.py",
        'of_grace <= 0 and duplicate.holder.state == "running"',
        "False",
        "tests/overlap/test_replace.py::test_stubborn_body_is_terminated[prefork]",
        "state in",
    ),
    Mutant(
        "a replaced task is stored as revoked",
        "worker/execution.py",
        "        if state.is_stopped_by(error):\n",
        "        if False:\n",
        "tests/overlap/test_replace.py::test_stopped_body[prefork-replace-ensure]",
        "state in .*REVOKED",
    ),
    Mutant(
        "what would have followed a terminated task is revoked",
        "worker/request.py",
        "            revoke_successors(self.task, context_of_request(self))\n",
        "            pass\n",
        "tests/overlap/test_replace.py::test_canvas_of_a_terminated_task[prefork]",
        "timed out|TimeoutError",
    ),
    Mutant(
        "the end of a replaced task is stored once",
        "worker/replaced.py",
        "    if stored_state(attempt.task, attempt.request) in READY_STATES:\n",
        "    if False:\n",
        "tests/unit/test_replace.py::test_redelivery_of_a_replaced_message[FAILURE-FAILURE]",
        "'REVOKED'",
    ),
    Mutant(
        "another message with the holder's task id is no redelivery",
        "store/redis/acquire.lua",
        "  is_own = is_same(redis.call('HGET', KEYS[1], 'identity'))",
        "  is_own = true",
        "tests/overlap/test_line_faults.py::test_message_with_the_task_id_of_the_holder",
        "comes again, as another message",
    ),
    Mutant(
        "of several newcomers the latest runs",
        "store/redis/acquire.lua",
        "  use(newest, has_id and '' or 'superseded')\n",
        "",
        "tests/contract/test_replace.py::test_latest_newcomer_waits[redis]",
        "SUPERSEDED",
    ),
    Mutant(
        "a message that joins finds the lock free twice before it runs",
        "worker/join.py",
        "    if state.was_free_before if holder is None else",
        "    if True if holder is None else",
        "tests/overlap/test_join.py::test_holder_without_a_result[prefork]",
        "> 0.9",
    ),
    Mutant(
        "a message does not join a task that sent it",
        "worker/join.py",
        "    elif holder.task_id in (attempt.request.parent_id, attempt.request.root_id):\n",
        "    elif False:\n",
        "tests/overlap/test_join.py::test_descendant[prefork]",
        "isinstance.*TimeoutError",
    ),
    Mutant(
        "a message that joins follows its holder through retries",
        "worker/join.py",
        "    if found not in (RETRY, _UNKNOWN):",
        "    if found != _UNKNOWN:",
        "tests/overlap/test_join.py::test_own_retries_of_the_holder[prefork]",
        "assert",
    ),
    Mutant(
        "a message that joins follows the holder that it meets",
        "worker/join.py",
        "copy=0.0, follows=holder.task_id,",
        "copy=0.0, follows=state.follows or holder.task_id,",
        "tests/overlap/test_join.py::test_killed_holder[prefork]",
        "assert 2 ==",
    ),
    Mutant(
        "the error of a killed worker is no result to join",
        "worker/join.py",
        "_VANISHED = (WorkerLostError, Retry)",
        "_VANISHED = ()",
        "tests/unit/test_join.py::test_worker_that_died",
        "died",
    ),
    Mutant(
        "a message that joins fails after max_wait",
        "policies/join.py",
        "        if duplicate.waited >= self.max_wait:\n",
        "        if False:\n",
        "tests/unit/test_join.py::test_max_wait",
        "Fail",
    ),
    Mutant(
        "no new lease in a grace period",
        "store/redis/acquire.lua",
        "  if left > 0 then return",
        "  if false then return",
        "test_failover.py::test_lost_data_with_grace[prefork-_flush]",
        "assert 1 == 2|reacquired",
    ),
    Mutant(
        "a task waits for the end of a grace period, whatever on_store_error says",
        "worker/duplicates.py",
        "    if in_line or is_grace:\n",
        "    if in_line:\n",
        "test_failover.py::test_lost_data_with_grace[prefork-_flush]",
        "key {'run'",  # the first body runs without a lock
    ),
    Mutant(
        "a lease counts only once the replicas have it",
        "store/redis/store.py",
        "            if count is None or count < self._replicas:\n",
        "            if False:\n",
        "test_failover.py::test_no_replica[prefork]",
        "postponed",
    ),
    Mutant(
        "a lease that was granted and does not count is given back",
        "worker/execution.py",
        "state.unreleased = isinstance(error, StoreUnavailable) and not isinstance(error, GracePeriod)",
        "state.unreleased = False",
        "test_failover.py::test_no_replica[prefork]",
        "'does': \\['free'\\]",
    ),
    Mutant(
        "all connections are made anew where replicas are missing",
        "store/redis/store.py",
        "            self._generation.end()\n",
        "",
        "tests/contract/test_replicas.py::test_connections_are_made_anew[redis]",
        "the server has closed the others",
    ),
)


def green(row: str) -> str:
    """Return why a row fails in an unchanged copy, or an empty text if it passes.

    Arguments:
        row: the test.
    """
    with _copy() as copy:
        came = run(copy, _path(row))
    return "" if came == GREEN else f"its row is not green where nothing is missing: {came}"


def red(mutant: Mutant) -> str:
    """Return what is wrong with a mutant, or an empty text if its row fails as it must.

    Arguments:
        mutant: to check.
    """
    with _copy() as copy:
        path = copy / PACKAGE / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"its text is {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new))
        came = run(copy, _path(mutant.row), mutant.shows)
    if came == RED:
        return ""
    return "its row stays green" if came == GREEN else f"its row cannot run: {came}"


def _path(row: str) -> str:
    return row if row.startswith("tests/") else f"tests/faults/matrix/{row}"


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """Yield a directory with the package and its tests."""
    copy = new_directory("mutant")
    try:
        for name in (PACKAGE, "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "setup.cfg", copy)
        yield copy
    finally:
        remove_directory(copy)


def run(directory: Path, test: str, shows: str = "") -> str:
    """Run a test, and return ``GREEN`` (passed), ``RED`` (failed as expected), or why it is neither.

    Arguments:
        directory: of the tests and the tested package.
        test: in pytest's spelling.
        shows: a pattern that the failure's message must match.
    """
    report = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", f"--junitxml={report}", test]
    env = {**os.environ, "PYTHONPATH": str(directory)}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not report.exists():
        return f"pytest ended with {done.returncode}: {done.stdout[-500:]}"
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    if count["errors"] or count["skipped"] or not count["tests"]:
        return f"{count}: {done.stdout[-500:]}"
    if WorkerFailed.__name__ in done.stdout:  # the test did not reach what it checks
        return f"a worker does not start: {done.stdout[-500:]}"
    said = [failure.attrib["message"] for failure in suite.iter("failure")]
    if said and not re.search(shows, said[0]):
        return f"red for another reason: {said[0][:500]}"
    return RED if said else GREEN


def main(names: list[str]) -> int:
    """Check all mutants, or the named ones, and return the exit code."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    rows = list(dict.fromkeys(mutant.row for mutant in chosen))
    with ThreadPoolExecutor(LANES) as threads:
        whole = dict(zip(rows, threads.map(green, rows), strict=True))
        verdicts = list(threads.map(lambda mutant: whole[mutant.row] or red(mutant), chosen))
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        print(f"{'red' if not verdict else 'FAILED':<7}{mutant.name:<50} {mutant.row} {verdict}")
    return int(any(verdicts) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
