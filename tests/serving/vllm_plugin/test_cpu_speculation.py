from types import ModuleType

import pytest
import torch

from onlinerl.serving.vllm_plugin.cpu_speculation import expand_batch_to_tokens, repair


def test_every_token_gets_the_value_of_its_request() -> None:
    temperatures = torch.tensor([0.5, 2.0, 3.0])
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)

    assert expand_batch_to_tokens(temperatures, ends, 5).tolist() == [0.5, 0.5, 3.0, 3.0, 3.0]


def test_the_temperature_of_greedy_requests_is_replaced() -> None:
    temperatures = torch.tensor([0.0, 0.7])
    ends = torch.tensor([1, 3], dtype=torch.int32)
    found = expand_batch_to_tokens(temperatures, ends, 3, replace_from=0, replace_to=1)

    assert found.tolist() == pytest.approx([1.0, 0.7, 0.7])


def test_whole_numbers_keep_their_type() -> None:
    found = expand_batch_to_tokens(
        torch.tensor([20, 5], dtype=torch.int32), torch.tensor([1, 2]), 2
    )

    assert (found.tolist(), found.dtype) == ([20, 5], torch.int32)


def test_no_guess_is_no_token() -> None:
    assert expand_batch_to_tokens(torch.tensor([1.0]), torch.tensor([0]), 0).tolist() == []


def test_another_vllm_is_noticed() -> None:
    module = ModuleType("rejection_sampler")
    with pytest.raises(AttributeError, match="any more"):
        repair(module)
    module.expand_batch_to_tokens = None  # type: ignore[attr-defined]
    repair(module)
    assert module.expand_batch_to_tokens is expand_batch_to_tokens
