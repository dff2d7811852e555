"""Run the whole service on this machine for half a minute, and kill one worker while it holds locks."""

import argparse
import sys
from pathlib import Path

from redis import RedisError

from example_project import demo, display, interrupts
from example_project.processes import DemoFailed
from example_project.redis_server import NoServerFound


def options() -> demo.Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m example_project", description=__doc__)
    parser.add_argument(
        "--redis-url", metavar="URL", help="use this Redis server and database; the demo adds a key prefix of its own"
    )
    parser.add_argument(
        "--seconds", type=float, default=24.0, help="seconds during which work is sent (default: %(default)g)"
    )
    parser.add_argument("--no-kill", action="store_true", help="leave all workers alive")
    parser.add_argument("--keep", action="store_true", help="keep the working directory with ledger and logs")
    parser.add_argument(
        "--timeline",
        type=Path,
        default=Path("timeline.svg"),
        metavar="PATH",
        help="file for the picture (default: %(default)s)",
    )
    words = parser.parse_args()
    if not 5 <= words.seconds <= 3600:
        parser.error("--seconds must be from 5 to 3600")
    if not words.timeline.parent.is_dir():
        parser.error(f"--timeline: there is no directory {words.timeline.parent}")
    return demo.Options(words.seconds, not words.no_kill, words.keep, words.timeline, words.redis_url)


def main() -> int:
    """Run the demo and return its exit code: 0 success, 1 a broken promise, 2 the demo could not run, 130 interrupted."""
    spec = options()
    interrupts.listen()
    try:
        return demo.run(spec, display.choose())
    except (DemoFailed, NoServerFound, RedisError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
