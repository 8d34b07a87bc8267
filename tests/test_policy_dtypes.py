"""Which dtype a weight is sent in."""

import pytest
import torch

from weightsync.errors import ConfigurationError
from weightsync.policy import DtypePolicy

ROUTER = "model.layers.3.mlp.gate.e_score_correction_bias"


def test_default_is_as_stored():
    tensor = torch.ones(2, dtype=torch.float64)
    assert DtypePolicy().apply("w", tensor) is tensor


def test_router_bias_keeps_digits_that_bfloat16_has_not():
    bias = torch.tensor([1.0, 1.001, 1.002])
    assert bias.bfloat16().unique().numel() == 1
    for policy in (DtypePolicy("bf16"), DtypePolicy("bf16", {"*": torch.bfloat16})):
        sent = policy.apply(ROUTER, bias)
        assert sent.dtype == torch.float32
        assert torch.equal(sent, bias)
    assert DtypePolicy("bf16", kept=()).apply(ROUTER, bias).dtype == torch.bfloat16
    assert DtypePolicy("bf16").dtype_of("e_score_correction_bias", torch.float32) == torch.float32


def test_first_matching_override_wins():
    policy = DtypePolicy("bf16", {"*.norm.weight": "float32", "lm_head.*": "keep", "*": "fp16"})
    assert policy.dtype_of("model.norm.weight", torch.bfloat16) == torch.float32
    assert policy.dtype_of("lm_head.weight", torch.float64) == torch.float64
    assert policy.dtype_of("model.layers.0.mlp.up_proj.weight", torch.float32) == torch.float16


def test_names_are_not_confused():
    policy = DtypePolicy(None, {"*.mlp.gate_proj.weight": "bf16"})
    assert policy.dtype_of("l.mlp.gate_proj.weight", torch.float32) == torch.bfloat16
    assert policy.dtype_of("l.mlp.gate.weight", torch.float32) == torch.float32
    assert policy.dtype_of("l.MLP.gate_proj.weight", torch.float32) == torch.float32


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    ],
)
def test_other_dtypes_are_never_touched(dtype):
    tensor = torch.ones(3).to(dtype)
    assert DtypePolicy("bf16", {"*": "fp32"}).apply("w", tensor) is tensor


@pytest.mark.parametrize("wrong", ["int8", "float8_e4m3fn", "bfloat", torch.int32, torch.float8_e5m2])
def test_targets_that_would_destroy_values_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="not cast to"):
        DtypePolicy(wrong)
    with pytest.raises(ConfigurationError, match="not cast to"):
        DtypePolicy(None, {"*": wrong})


def test_cast_values():
    sent = DtypePolicy(torch.bfloat16).apply("w", torch.tensor([1.0, 1.5, -2.25]))
    assert torch.equal(sent, torch.tensor([1.0, 1.5, -2.25], dtype=torch.bfloat16))
