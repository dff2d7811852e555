"""A user who has installed the library and nothing else: ``python tests/installed.py`` in an environment of its own.

It runs the first example of the README as it stands there, and ten tasks, in empty directories. As a script, it finds no module
of the source tree but those beside it: the library comes from where pip has put it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from servers import Process, RedisServer, new_directory, until, warden  # type: ignore[import-not-found]

APP = """
import os, time
from celery import Celery
from celery_singleton_lock import SingletonTask

app = Celery("shop", broker=os.environ["REDIS"], backend=os.environ["REDIS"])
app.conf.update(broker_connection_retry_on_startup=True, task_track_started=True)

@app.task(base=SingletonTask, unique_on=["number"])
def square(number):
    return number * number

@app.task(base=SingletonTask)
def long():
    while not os.path.exists("go"):
        time.sleep(0.1)
    return "the only one"
"""

CALLS = """
import pathlib, subprocess, sys, time
import shop

assert [number * number for number in range(8)] == [shop.square.delay(number).get(timeout=30) for number in range(8)]
first = shop.long.delay()
while first.state != "STARTED":
    time.sleep(0.1)
second = shop.long.delay()
assert second.get(timeout=30) is None, "the duplicate is skipped"
listed = subprocess.run([sys.executable, "-m", "celery", "-A", "shop", "singleton", "list"], capture_output=True, text=True)
assert first.id in listed.stdout, listed
pathlib.Path("go").touch()
assert "the only one" == first.get(timeout=30)
"""


README = Path(__file__).resolve().parents[1] / "README.md"


def first_example() -> None:
    """Do what the README says under "Try it", and find the log lines that it shows.

    Raises:
        NotInTime: a line does not come; the worker's log is printed.
    """
    text = README.read_text(encoding="utf-8").partition("## Try it")[2]
    code, commands, shown = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("python", "console", "text")
    )
    start, call = (shlex.split(command) for command in commands.splitlines())
    os.chdir(new_directory("readme"))
    Path("tasks.py").write_text(code)
    with RedisServer() as redis:
        # Celery takes these for the URLs of the example, whose ports may be in use here.
        env = {**os.environ, "CELERY_BROKER_URL": redis.url(), "CELERY_RESULT_BACKEND": redis.url(1)}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        worker = Process(start, Path("worker.log"), env)
        worker.start()
        lines = [re.escape(line).replace("…", ".*") for line in shown.splitlines()]
        try:
            until(lambda: " ready." in worker.output() or not worker.running, "the worker is ready")
            subprocess.run(call, env=env, timeout=60, check=True)
            until(lambda: re.search(".*".join(lines), worker.output(), re.DOTALL), "the lines of the README")
        except BaseException:
            print(worker.output())
            raise
        finally:
            worker.stop()


def main() -> None:
    """Run the app of a user in a directory of its own.

    Raises:
        CalledProcessError: a call failed; the worker's log is printed.
    """
    import celery_singleton_lock

    assert "site-packages" in celery_singleton_lock.__file__, celery_singleton_lock.__file__
    print({name: metadata.version(name) for name in ("celery-singleton-lock", "celery", "kombu", "redis")})
    directory = new_directory("installed")
    (directory / "shop.py").write_text(APP)
    first_example()
    with RedisServer() as redis:
        env = {**os.environ, "REDIS": redis.url(), "PYTHONPATH": str(directory)}
        command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "--loglevel", "INFO", "--concurrency", "2"]
        os.chdir(directory)
        worker = Process(command, Path("worker.log"), env)
        worker.start()
        until(lambda: " ready." in worker.output() or not worker.running, "the worker is ready")
        done = subprocess.run([sys.executable, "-c", CALLS], env=env, timeout=200)
        worker.stop()
    if done.returncode:
        print(worker.output())
    warden.end()
    done.check_returncode()


if __name__ == "__main__":
    main()
