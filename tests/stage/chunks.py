# SPDX-License-Identifier: Apache-2.0
"""Stages that exchange chunks by vLLM-Omni's own `OmniChunkTransferAdapter`.

Run as a module it loads the wheel once, and forks each `Stage` that it is asked for.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE

from ..patience import PATIENCE_S
from .wheel import make_importable, make_loadable

# Longest life of a stage, in seconds: none outlives a test that has gone wrong.
_LIFE_S: Final = 300

SMALL, LARGE = 4 << 10, 4 << 20
"""Bytes of the tensor in a chunk."""


def tensor_of(seed: int, size: int) -> torch.Tensor:
    """A tensor of `size` bytes that no other seed has."""
    values = torch.arange(size // 4, dtype=torch.int32)
    return (values * 2654435761 + seed * 40503).view(torch.int32)


def codes_of(seed: int) -> list[int]:
    """The codec tokens of a chunk."""
    return [seed, seed + 1, seed * 3 + 7]


def next_stage_input(*, multimodal_output: Any, **_: Any) -> Any:
    """What a model's stage processor makes of a step's output: the chunk to send."""
    from vllm_omni.data_entry_keys import CodesStruct, OmniPayloadStruct

    if multimodal_output is None:
        return None
    seed, size = multimodal_output["seed"], multimodal_output["size"]
    return OmniPayloadStruct(
        codes=CodesStruct(audio=torch.tensor(codes_of(seed))), hidden=tensor_of(seed, size)
    )


class Stage:
    """One stage of a pipeline: the adapter, and what vLLM-Omni's scheduler does with it."""

    def __init__(self, number: int, connector: dict[str, Any]) -> None:
        from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
            OmniChunkTransferAdapter,
        )

        model = SimpleNamespace(
            stage_connector_config=connector,
            stage_id=number,
            async_chunk=True,
            worker_type="generation",
            custom_process_next_stage_input_func=f"{__name__}.next_stage_input",
        )
        scheduler = SimpleNamespace(max_num_seqs=8)
        self.adapter = OmniChunkTransferAdapter(
            SimpleNamespace(model_config=model, scheduler_config=scheduler)
        )

    def send(self, external: str, seeds: list[int], size: int, ends: bool = True) -> None:
        """Queue a chunk for each seed; the request ends with the last, or goes on."""
        request = self._request(f"{external}-sent", external)
        for at, seed in enumerate(seeds):
            if ends and at == len(seeds) - 1:
                request.status = self._statuses().FINISHED_STOPPED
            self.adapter.save_async(
                {"seed": seed, "size": size}, request, confirmed_num_computed_tokens=at
            )

    def sent(self, deadline_s: float) -> dict[str, str]:
        """Wait until requests have ended; returns those that were given up, and why."""
        adapter = self.adapter
        deadline = time.monotonic() + deadline_s
        failures: dict[str, str] = {}
        while time.monotonic() < deadline:
            failures |= adapter.collect_failed_send_request_ids()
            if not adapter._sender_tokens and not adapter._pending_save_reqs:
                break
            if failures:
                break
            time.sleep(0.001)
        return failures

    def put(self, external: str, chunks: int, deadline_s: float) -> int:
        """Wait until so many chunks of a request were put; returns how many were."""
        deadline = time.monotonic() + deadline_s
        done = lambda: self.adapter.put_req_chunk[external]  # noqa: E731
        while done() < chunks and time.monotonic() < deadline:
            time.sleep(0.001)
        return done()

    def abort(self, external: str, deadline_s: float) -> None:
        """What the scheduler does when a request is aborted; waits until it is done."""
        adapter = self.adapter
        adapter.cleanup(f"{external}-sent", external)
        deadline = time.monotonic() + deadline_s
        while adapter._pending_save_reqs and time.monotonic() < deadline:
            time.sleep(0.001)
        adapter.save_async(None, self._request("flush", "flush"))
        while adapter._pending_save_reqs and time.monotonic() < deadline:
            time.sleep(0.001)

    def receive(
        self, external: str, deadline_s: float, most: int = 1 << 30
    ) -> tuple[list[tuple[list[int], int, bool]], bool, bool]:
        """Schedule a request until its chunks have ended.

        Args:
            external: the request, as its sender calls it.
            deadline_s: seconds of waiting for a chunk after which vLLM-Omni gives it up.
            most: chunks after which to stop.

        Returns:
            Of each chunk its codes, its tensor's bytes, and whether these are those of its codes;
            whether the last one came; whether vLLM-Omni gave it up.
        """
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        adapter = self.adapter
        request = self._request(f"{external}-got", external)
        number = request.request_id
        known = {number: request}
        waiting, running = FCFSRequestQueue(), []
        waiting.add_request(request)
        found: list[tuple[list[int], int, bool]] = []
        given_up = ended = False
        while not (given_up or ended) and len(found) < most:
            adapter.process_pending_chunks(waiting, running, scheduler_requests=known)
            if number in adapter.requests_with_ready_chunks:
                hidden = request.additional_information["hidden"]
                codes = list(request.prompt_token_ids)
                whole = torch.equal(hidden, tensor_of(codes[0], hidden.nbytes))
                found.append((codes, hidden.nbytes, whole))
                ended = adapter.is_done_receiving_chunks(number)
                step = SimpleNamespace(
                    scheduled_new_reqs=[SimpleNamespace(req_id=number)], scheduled_cached_reqs=None
                )
                adapter.postprocess_scheduler_output(step, known)
            else:
                time.sleep(0.001)
            adapter.restore_queues(waiting, running, known)
            given_up = number in adapter.collect_timed_out_request_ids(deadline_s)
        adapter.finish_requests(number, self._statuses().FINISHED_ABORTED, known)
        return found, ended, given_up

    def close(self) -> None:
        """End its threads and its connector."""
        self.adapter.shutdown()

    @staticmethod
    def _statuses() -> Any:
        from vllm.v1.request import RequestStatus

        return RequestStatus

    @staticmethod
    def _request(number: str, external: str) -> Any:
        from vllm import SamplingParams
        from vllm_omni.request import OmniRequest

        return OmniRequest(
            request_id=number,
            external_req_id=external,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
        )


class RemoteStage:
    """A `Stage`, or the like, in a process of its own, forked by `Host`."""

    def __init__(self, host: "Host", *arguments: Any, wait: bool = True) -> None:
        self._connection = host.start(arguments)
        if wait:
            self.begun()

    def begun(self) -> None:
        """Wait until it has begun, unless it was made so."""
        self.pid: int = self._answer()

    def __call__(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """What a method of the stage returns."""
        self.begin(method, *arguments, **keywords)
        return self._answer()

    def begin(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method; `end` returns what it returns."""
        self._connection.send((method, arguments, keywords))

    def end(self) -> Any:
        """What the method returns that was called last."""
        return self._answer()

    def close(self) -> None:
        """Let it end by itself."""
        self._connection.close()

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def _answer(self) -> Any:
        if not self._connection.poll(_LIFE_S):
            raise TimeoutError("the stage gives no answer")
        worked, result = self._connection.recv()
        if not worked:
            raise RuntimeError(result)
        return result


class Host:
    """The process that has the wheel loaded, as its parent sees it.

    Args:
        process: runs this module; its stdin takes the paths of sockets to fork for.
        folder: for sockets.
    """

    def __init__(self, process: Any, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._number = 0

    def start(self, arguments: tuple[Any, ...]) -> Connection:
        """Fork a stage; returns the connection to it."""
        self._number += 1
        path = str(self._folder / f"s{self._number}")
        with Listener(path, "AF_UNIX") as listener:
            print(path, file=self._process.stdin, flush=True)
            connection = listener.accept()
        connection.send(arguments)
        return connection


@contextmanager
def host_of(module: str, root: Path, runtime: Path) -> Iterator[Host]:
    """A process that runs a module of this folder, and forks stages.

    Args:
        module: calls `fork_stages`.
        root: folder that the wheel was unpacked into.
        runtime: the runtime folder of the stages.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.stage.{module}", str(root)],
        stdin=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, RUNTIME_DIR_VARIABLE: str(runtime)},
    )
    yield Host(process, runtime)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def _serve(path: str, kind: Callable[..., Any]) -> None:
    signal.alarm(_LIFE_S)
    torch.set_num_threads(1)
    connection = Client(path, "AF_UNIX")
    stage: Any = None
    try:
        try:
            stage = kind(*connection.recv())
        except ValueError as error:
            connection.send((False, str(error)))
            return
        connection.send((True, os.getpid()))
        while True:
            method, arguments, keywords = connection.recv()
            try:
                connection.send((True, getattr(stage, method)(*arguments, **keywords)))
            except Exception as error:  # noqa: BLE001 - the test gets it
                connection.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        if stage is not None:
            stage.close()


def fork_stages(kind: Callable[..., Any]) -> None:
    """Fork a process for each line of stdin, once all that they import is loaded.

    Args:
        kind: makes the stage in each, with the arguments that its `RemoteStage` has.
    """
    from omni_connector.stage.vllm_omni import register

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    register()
    assert threading.active_count() == 1
    for line in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                _serve(line.strip(), kind)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)


def main(root: str) -> None:
    """Load the wheel, and fork a stage for each line of stdin."""
    make_importable(Path(root))
    make_loadable()
    import vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter
    import vllm_omni.request  # noqa: F401

    fork_stages(Stage)


if __name__ == "__main__":
    main(sys.argv[1])
