"""New weights in a real vLLM that serves: the right ones, under the right id, no request lost."""

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from onlinerl.deploy.config import DeployConfig
from onlinerl.deploy.replicas.engine_control import HttpEngineControl
from onlinerl.deploy.replicas.fleet import Expectation, Fleet, Probe
from onlinerl.deploy.weights.delta import (
    HostTensor,
    read_checkpoint,
    read_manifest,
    version_folder,
    write_anchor,
    write_delta,
)
from onlinerl.errors import PromotionFailed, WeightsError
from tests.integration.engines import Engine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
]

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
MAX_MEAN_DIFF = 0.01
NUM_STREAMED = 400
"""At the engine's pace in that test about eight seconds, into which a swap falls."""


def moved(base: Mapping[str, HostTensor], *, seed: int) -> dict[str, HostTensor]:
    """Every fifth weight or so, 15 % larger or smaller: far enough to tell versions apart."""
    generator = np.random.default_rng(seed)
    result = {}
    for name, tensor in base.items():
        values = (tensor.bits.astype(np.uint32) << 16).view(np.float32)
        factor = generator.choice(np.array([0.85, 1, 1, 1, 1.15], np.float32), size=values.size)
        bits = ((values * factor).view(np.uint32) >> 16).astype(np.uint16)
        result[name] = HostTensor(tensor.dtype, tensor.shape, bits)
    return result


@dataclass
class Versions:
    """Three versions: on disk for the engine, in memory for the truth."""

    root: Path
    model_dir: Path
    weights: dict[int, dict[str, HostTensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights[1] = read_checkpoint(self.model_dir)
        self.weights[2] = moved(self.weights[1], seed=2)
        self.weights[3] = moved(self.weights[2], seed=3)
        write_anchor(self.root, policy="assistant", version=1, weights=self.weights[1])
        for version in (2, 3):
            write_delta(
                self.root,
                policy="assistant",
                version=version,
                weights=self.weights[version],
                parent_version=version - 1,
                parent=self.weights[version - 1],
            )

    def logprobs(self, version: int, token_ids: list[int]) -> list[float]:
        """What transformers says of every token after the first."""
        model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32
        )
        state = {
            name: torch.from_numpy(tensor.bits.view(np.int16).copy())
            .view(torch.bfloat16)
            .view(tensor.shape)
            for name, tensor in self.weights[version].items()
        }
        model.load_state_dict(state, strict=False)
        ids = torch.tensor(token_ids)
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found: list[float] = logprobs.gather(1, ids[1:, None])[:, 0].tolist()
        return found

    def expectation(self, version: int) -> Expectation:
        digest = read_manifest(self.root, version).digest()
        probe = Probe(token_ids=PROMPT, logprobs=self.logprobs(version, PROMPT))
        return Expectation(version, digest, [probe])


@pytest.fixture
def running(shared_engine: Engine) -> Engine:
    return shared_engine


@pytest.fixture(scope="module")
def versions(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return Versions(tmp_path_factory.mktemp("weights"), tiny_model_dir)


@pytest.fixture
def replica(running: Engine) -> HttpEngineControl:
    return HttpEngineControl(
        running.url,
        policy="assistant",
        request_timeout_s=20.0,
        commit_timeout_s=60.0,
        probe_timeout_s=60.0,
    )


@pytest.fixture
def fleet(replica: HttpEngineControl, versions: Versions) -> Fleet:
    """With version 1 in."""
    made = Fleet([replica], policy="assistant", root=versions.root, config=DeployConfig())
    made.swap(versions.expectation(1), fallback=None)
    return made


def difference(replica: HttpEngineControl, versions: Versions, version: int) -> float:
    found = replica.logprobs(PROMPT)
    return float(np.abs(np.subtract(found, versions.logprobs(version, PROMPT))).mean())


def test_the_engine_agrees_with_transformers_after_every_swap_and_back(
    fleet: Fleet, replica: HttpEngineControl, versions: Versions
) -> None:
    for version in (2, 3, 1, 3, 2):
        report = fleet.swap(versions.expectation(version), fallback=None)

        assert replica.stamp() == f"assistant/{version}"
        assert report.mean_abs_diff is not None
        assert report.mean_abs_diff < MAX_MEAN_DIFF
        # The bound tells the versions apart.
        others = [other for other in versions.weights if other != version]
        assert all(difference(replica, versions, each) > 5 * MAX_MEAN_DIFF for each in others)


def test_a_corrupt_file_leaves_the_old_id_and_the_old_weights(
    fleet: Fleet, replica: HttpEngineControl, versions: Versions
) -> None:
    file = version_folder(versions.root, 2) / "forward.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    expectation = versions.expectation(2)
    try:
        with pytest.raises(PromotionFailed, match="nothing was changed"):
            fleet.swap(expectation, fallback=1)
    finally:
        file.write_bytes(whole)

    assert replica.stamp() == "assistant/1"
    assert not replica.is_paused()
    assert difference(replica, versions, 1) < MAX_MEAN_DIFF
    fleet.swap(expectation, fallback=1)
    assert replica.stamp() == "assistant/2"


def test_applying_what_was_not_staged_changes_nothing(
    fleet: Fleet, replica: HttpEngineControl, versions: Versions
) -> None:
    replica.pause()
    with pytest.raises(WeightsError):
        replica.apply(3, "assistant/3")
    fleet.reachable()

    assert replica.stamp() == "assistant/1"
    assert not replica.is_paused()
    assert difference(replica, versions, 1) < MAX_MEAN_DIFF


def test_an_update_that_nobody_finished_is_taken_back(
    fleet: Fleet, replica: HttpEngineControl, running: Engine, versions: Versions
) -> None:
    stage(replica, versions, 2)
    replica.pause()
    post(running, "/start_weight_update")
    post(running, "/update_weights", {"update_info": {"version": 2}})
    # Here the controller dies. The engine is paused, its weights are new, its id is old.

    assert [each.name for each in fleet.not_on(1)] == []
    assert replica.stamp() == "assistant/1"
    assert not replica.is_paused()
    assert difference(replica, versions, 1) < MAX_MEAN_DIFF
    fleet.swap(versions.expectation(2), fallback=1)
    assert difference(replica, versions, 2) < MAX_MEAN_DIFF


def test_an_update_that_was_begun_and_brought_nothing_holds_up_no_later_one(
    fleet: Fleet, replica: HttpEngineControl, running: Engine, versions: Versions
) -> None:
    stage(replica, versions, 2)
    replica.pause()
    post(running, "/start_weight_update")
    # Here the controller dies.

    assert fleet.not_on(1) == []
    assert not replica.is_paused()
    fleet.swap(versions.expectation(2), fallback=1)
    assert replica.stamp() == "assistant/2"
    assert difference(replica, versions, 2) < MAX_MEAN_DIFF


def test_requests_live_through_a_swap_and_say_which_version_made_which_token(
    fleet: Fleet, running: Engine, versions: Versions
) -> None:
    expectation = versions.expectation(2)
    streams = [Stream(running, max_tokens=NUM_STREAMED, seed=seed) for seed in range(4)]
    with running.paced():
        for stream in streams:
            stream.start()
            stream.wait_for(num_tokens=10)
        fleet.swap(expectation, fallback=1)
    for stream in streams:
        stream.join(timeout=120)

    for stream in streams:
        assert stream.finish_reason == "length"
        assert len(stream.token_ids) == len(stream.logprobs) == NUM_STREAMED
        assert_tiles(stream.spans, num_tokens=NUM_STREAMED, versions=["assistant/1", "assistant/2"])
        # Tokens after the swap owe nothing to keys and values of the old weights.
        start = stream.spans[1]["start"]
        assert isinstance(start, int)
        whole = PROMPT + stream.token_ids
        new = versions.logprobs(2, whole)[len(PROMPT) - 1 + start :]
        old = versions.logprobs(1, whole)[len(PROMPT) - 1 :][:start]
        assert np.abs(np.subtract(stream.logprobs[start:], new)).mean() < MAX_MEAN_DIFF
        assert np.abs(np.subtract(stream.logprobs[:start], old)).mean() < MAX_MEAN_DIFF


def assert_tiles(spans: list[dict[str, object]], *, num_tokens: int, versions: list[str]) -> None:
    assert [span["version"] for span in spans] == versions
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == num_tokens


def stage(replica: HttpEngineControl, versions: Versions, version: int) -> None:
    replica.stage(versions.root, version)
    deadline = time.monotonic() + 60
    while replica.status()[0].state != "staged":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def post(running: Engine, path: str, body: object = None) -> None:
    request = urllib.request.Request(
        running.url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


class Stream(threading.Thread):
    """One streamed request, read token by token."""

    def __init__(self, running: Engine, *, max_tokens: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{running.url}/inference/v1/generate"
        self._body = {
            "model": "assistant",
            "token_ids": PROMPT,
            "stream": True,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": 1.0,
                "seed": seed,
                "logprobs": 0,
                "ignore_eos": True,
            },
        }
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[dict[str, object]] = []
        self.finish_reason: str | None = None

    def run(self) -> None:
        request = urllib.request.Request(
            self._url,
            data=json.dumps(self._body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    self._take(json.loads(text.removeprefix("data: ")))

    def _take(self, chunk: dict[str, list[dict[str, object]]]) -> None:
        for choice in chunk.get("choices", []):
            ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
            if isinstance(ids, list):
                self.token_ids += ids
            if isinstance(logprobs, dict):
                self.logprobs += [entry["logprob"] for entry in logprobs["content"]]
            if isinstance(spans := choice.get("weight_versions"), list) and spans:
                self.spans = spans
            if isinstance(reason := choice.get("finish_reason"), str):
                self.finish_reason = reason

    def wait_for(self, *, num_tokens: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.token_ids) < num_tokens:
            assert time.monotonic() < deadline
            assert self.is_alive()
            time.sleep(0.005)
