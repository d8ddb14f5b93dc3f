# SPDX-License-Identifier: MIT
"""Tests on several processes: a function of the test's file, run on every rank.

    @on_ranks(2, 4)
    def test_sum(rank, world):
        total = torch.tensor(rank)
        dist.all_reduce(total)
        assert total == world * (world - 1) // 2

torchrun starts four processes of one thread each, once: each needs seconds for PyTorch.
They serve one case after the other, the first `world` of them in a gloo group that is
made for the case and destroyed after it. A case fails with the traceback of every rank
where it does, and what ranks printed. After a failure, a crash or a hang the processes
are killed, and the next case starts others.
"""

import contextlib
import datetime
import faulthandler
import functools
import importlib
import inspect
import os
import pathlib
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection, wait

import pytest

MOST = 4  # ranks of a case
START = 180.0  # seconds until all processes have PyTorch, on a busy machine
GRACE = 3.0  # seconds for the other ranks to report, once one has failed


def on_ranks(*worlds, timeout=120.0, dies=()):
    """Decorates a test whose body runs on each of `world` processes.

    Its arguments `rank` and `world` are given; others are pytest's, pickled. Every rank
    starts with torch.manual_seed(0).

    timeout: seconds for all; collectives of the case give up earlier, after half.
    dies: the ranks that must end their process, by os._exit(); others are judged.
    """

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())

        @functools.wraps(body)
        def test(world, **arguments):
            run(body, world, timeout=timeout, dies=dies, **arguments)

        kept = [each for each in parameters if each.name != "rank"]
        if "world" not in [each.name for each in kept]:
            kept.append(inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(kept)
        return pytest.mark.parametrize("world", worlds)(test)

    return decorate


def run(function, world, *, timeout=120.0, dies=(), **arguments):
    """function(**arguments) on `world` processes; returns what it returned on each.

    function: of a module's top level; arguments and results are pickled. rank and world
    are added where it takes them. timeout, dies: as in on_ranks.
    """
    global _pool
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(function, world, timeout, dies, arguments)
    except BaseException:
        close()
        raise


def close():
    """Ends the processes."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


_pool = None


class _Pool:
    """The processes, each with a connection for orders and reports."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        address = str(pathlib.Path(self.folder.name, "socket"))
        self.connections, self.pids, self.seen, self.cases = {}, {}, {}, 0
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RANKS_SOCKET": address}
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        options = ("--nproc-per-node", str(MOST), "--redirects", "3")
        where = ("--log-dir", str(pathlib.Path(self.folder.name, "logs")), __file__)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(MOST)
            listener.settimeout(1.0)
            self.torchrun = subprocess.Popen(
                (*command, *options, *where),
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._accept(listener)

    def _accept(self, listener):
        """The processes say who they are, or there is an error."""
        end = time.monotonic() + START
        while len(self.connections) < MOST:
            ended = self.torchrun.poll() is not None
            if ended or time.monotonic() > end:
                printed = self._printed(range(MOST))
                self.close()
                pytest.fail(f"torchrun started no processes\n{printed}", pytrace=False)
            with contextlib.suppress(TimeoutError):
                connection = Connection(listener.accept()[0].detach())
                rank, pid = _receive(connection)
                self.connections[rank], self.pids[rank] = connection, pid

    def run(self, function, world, timeout, dies, arguments):
        self.cases += 1
        self._printed(range(MOST))
        names = (function.__module__, function.__qualname__, sys.path)
        order = (self.cases, names, world, timeout / 2, bool(dies), arguments)
        for rank in range(world):
            _send(self.connections[rank], order)
        reports = self._reports(world, timeout, dies)
        failed = [
            f"rank {rank} of {world}: {words}"
            for rank, (words, _) in sorted(reports.items())
            if words
        ]
        if failed:
            text = "\n".join(failed) + self._printed(range(world))
            pytest.fail(text, pytrace=False)
        if dies:
            close()
        return [reports[rank][1] for rank in range(world)]

    def _reports(self, world, timeout, dies):
        """rank → (what went wrong, what was returned), of all ranks."""
        reports, end = {}, time.monotonic() + timeout
        while len(reports) < world and (left := end - time.monotonic()) > 0:
            waiting = {self.connections[r]: r for r in range(world) if r not in reports}
            for connection in wait(list(waiting), left):
                rank = waiting[connection]
                report = self._report(connection, rank in dies)
                reports[rank] = report
                if report[0]:
                    end = min(end, time.monotonic() + GRACE)
        failed = any(words for words, _ in reports.values())
        stuck = set(range(world)) - set(reports)
        for rank in stuck:
            os.kill(self.pids[rank], signal.SIGUSR1)  # prints where it is
            seconds = f"{GRACE} s after others" if failed else f"after {timeout} s"
            reports[rank] = f"did not end, {seconds}; below is where it was", None
        time.sleep(0.5 if stuck else 0)
        return reports

    def _report(self, connection, dies):
        try:
            words, returned = _receive(connection)
        except (EOFError, OSError):
            return (None if dies else "its process died"), None
        return (
            "should have died, but ended" if dies and not words else words
        ), returned

    def _printed(self, ranks):
        """What the ranks have printed since this was last asked."""
        texts = []
        for rank in ranks:
            logs = pathlib.Path(self.folder.name, "logs")
            for path in sorted(logs.glob(f"*/attempt_0/{rank}/std*.log")):
                text = path.read_text(errors="replace")
                new = text[self.seen.get(path, 0) :]
                self.seen[path] = len(text)
                lines = [x for x in new.splitlines() if not x.startswith("[Gloo]")]
                if lines:
                    texts += [f"\nrank {rank}, {path.stem}:", *lines[-80:]]
        return "\n".join(texts)

    def close(self):
        for connection in self.connections.values():
            connection.close()  # at which a process ends, unless it is stuck
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # It ends the processes of which nothing has been heard.
        self.torchrun.terminate()
        try:
            self.torchrun.wait(10)
        except subprocess.TimeoutExpired:
            self.torchrun.kill()
            self.torchrun.wait()
        self.folder.cleanup()


def _send(connection, value):
    """By plain pickle: the connection's own would share the memory of tensors."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection):
    return pickle.loads(connection.recv_bytes())


def _serve():
    """A process of the pool: cases, one after the other, until the pool is closed."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    rank = int(os.environ["RANK"])
    connection: Connection = Client(os.environ["RANKS_SOCKET"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore(*place, is_master=False)
    _send(connection, (rank, os.getpid()))
    orders = queue.SimpleQueue()

    def listen():
        while True:
            try:
                orders.put(_receive(connection))
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        case, names, world, timeout, someone_dies, arguments = orders.get()
        if someone_dies:  # at which torchrun ends the others before they have reported
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["WORLD_SIZE"] = str(world)
        try:
            if dist.is_initialized():  # of the last case, which has ended on every rank
                dist.destroy_process_group()
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"case {case}", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
            torch.manual_seed(0)
            returned = _call(names, dict(rank=rank, world=world), arguments)
            report = None, returned
        except BaseException:
            report = traceback.format_exc(), None
        _send(connection, report)


def _call(names, given, arguments):
    module, name, paths = names
    sys.path[:] = paths
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function = inspect.unwrap(function)
    takes = inspect.signature(function).parameters
    given = {each: value for each, value in given.items() if each in takes}
    return function(**given, **arguments)


if __name__ == "__main__":
    _serve()
