"""Weight streams of plain modules: names, ties, buffers, experts, sizes, memory."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.policy import DtypePolicy, module_weights, weight_stream_from
from weightsync.policy.plan import plan_stream
from weightsync.testing.tiny_models import make_tiny_model


class Tied(nn.Module):
    """The usual shape of a language model, with a draft head of its own."""

    def __init__(self, tie: bool = True, config: object = None):
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.embed_tokens = nn.Embedding(6, 4)
        self.mtp = nn.Module()
        self.mtp.lm_head = nn.Linear(4, 6, bias=False)
        if tie:
            self.lm_head.weight = self.embed_tokens.weight
        if config is not None:
            self.config = config
            self._tied_weights_keys = ["lm_head.weight"]


def values(stream) -> dict[str, torch.Tensor]:
    manifest = stream.manifest
    items = dict(stream)
    assert list(items) == manifest.names
    for spec in manifest.tensors:
        assert tuple(items[spec.name].shape) == spec.shape
        assert str(items[spec.name].dtype) == f"torch.{spec.dtype}"
        assert not items[spec.name].requires_grad
    return items


def test_values_are_the_live_ones():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    stream = module_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model[1].running_mean.fill_(7)
    sent = values(stream)
    assert sent.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(sent[name], tensor)
    assert sent["1.num_batches_tracked"].dtype == torch.int64


def test_non_persistent_buffers_are_not_sent_and_buffers_may_be_left_out():
    model = nn.Linear(2, 2)
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model.register_buffer("scale", torch.ones(()))
    assert module_weights(model).manifest.names == ["weight", "bias", "scale"]
    assert module_weights(model, include_buffers=False).manifest.names == ["weight", "bias"]


@pytest.mark.slow
def test_wrapper_prefixes_are_left_out_and_lookalikes_kept():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Module())
    model[1].module = nn.Linear(2, 2)
    wrapped = torch.compile(nn.DataParallel(model))
    names = module_weights(wrapped).manifest.names
    assert names == ["0.weight", "0.bias", "1.module.weight", "1.module.bias"]


def test_rename_comes_last_and_collisions_are_errors():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    policy = DtypePolicy(None, {"0.weight": "bf16"})
    stream = module_weights(model, dtype_policy=policy, rename=lambda name: f"model.{name}")
    sent = values(stream)
    assert list(sent) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    assert sent["model.0.weight"].dtype == torch.bfloat16
    with pytest.raises(ManifestError, match=r"'0\.weight' and '1\.weight' are both renamed to 'weight'"):
        module_weights(model, rename=lambda name: name.split(".")[-1])


@pytest.mark.parametrize(
    ("tie", "config", "keep_tied", "heads"),
    [
        (True, None, None, ["embed_tokens", "mtp.lm_head"]),
        (True, None, True, ["lm_head", "embed_tokens", "mtp.lm_head"]),
        (False, None, None, ["lm_head", "embed_tokens", "mtp.lm_head"]),
        (True, SimpleNamespace(tie_word_embeddings=True), None, ["embed_tokens", "mtp.lm_head"]),
        # The receiver is built from the same configuration, so it has an output layer of its own to fill.
        (True, SimpleNamespace(tie_word_embeddings=False), None, ["lm_head", "embed_tokens", "mtp.lm_head"]),
        (True, SimpleNamespace(tie_word_embeddings=False), False, ["embed_tokens", "mtp.lm_head"]),
        # Declared, but not so any more: the values differ.
        (False, SimpleNamespace(tie_word_embeddings=True), None, ["lm_head", "embed_tokens", "mtp.lm_head"]),
    ],
)
def test_ties(tie, config, keep_tied, heads):
    names = module_weights(Tied(tie, config), keep_tied=keep_tied).manifest.names
    assert names == [f"{head}.weight" for head in heads]


def test_a_tie_of_storage_alone_is_a_tie_and_a_draft_head_is_kept_in_any_case():
    model = Tied(tie=False)
    model.lm_head.weight = nn.Parameter(model.embed_tokens.weight.data)
    model.mtp.lm_head.weight = model.embed_tokens.weight
    assert module_weights(model).manifest.names == ["embed_tokens.weight", "mtp.lm_head.weight"]


def test_equal_empty_tensors_are_not_ties():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0, 3))
    assert module_weights(model).manifest.names == ["a", "b"]


def test_declared_key_that_is_absent():
    model = Tied(config=SimpleNamespace(tie_word_embeddings=True))
    del model.lm_head
    assert module_weights(model).manifest.names == ["embed_tokens.weight", "mtp.lm_head.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3tied", "qwen3moe"])
def test_names_and_values_are_those_of_the_saved_checkpoint(kind, tmp_path):
    from safetensors.torch import load_file

    model = make_tiny_model(kind, seed=3, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = values(weight_stream_from(model, split_experts=True))
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    assert not any("inv_freq" in name for name in sent)


def fused_experts(gate_up: torch.Tensor, down: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.gate_up_proj = nn.Parameter(gate_up)
    model.mlp.experts.down_proj = nn.Parameter(down)
    return model


def test_expert_halves_land_in_their_slots():
    gate_up = torch.cat([torch.full((4, 3, 8), 1.0), torch.full((4, 3, 8), 2.0)], dim=1)
    gate_up += torch.arange(4.0)[:, None, None] * 10
    down = torch.arange(4 * 8 * 3.0).reshape(4, 8, 3)
    model = fused_experts(gate_up, down)
    assert module_weights(model).manifest.names == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    sent = values(module_weights(model, split_experts=True))
    assert len(sent) == 12
    for expert in range(4):
        prefix = f"mlp.experts.{expert}"
        assert torch.equal(sent[f"{prefix}.gate_proj.weight"], torch.full((3, 8), 1.0 + 10 * expert))
        assert torch.equal(sent[f"{prefix}.up_proj.weight"], torch.full((3, 8), 2.0 + 10 * expert))
        assert torch.equal(sent[f"{prefix}.down_proj.weight"], down[expert])


@pytest.mark.parametrize(
    ("gate_up", "down", "extra"),
    [((4, 8, 6), (4, 3, 8), False), ((4, 6, 8), (4, 8, 4), False), ((4, 6, 8), (4, 8, 3), True)],
    ids=["transposed", "sizes", "bias"],
)
def test_experts_in_another_layout_are_refused(gate_up, down, extra):
    model = fused_experts(torch.zeros(gate_up), torch.zeros(down))
    if extra:
        model.mlp.experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(ConfigurationError, match="send it fused"):
        module_weights(model, split_experts=True)
    assert len(module_weights(model).manifest) == 2 + extra


def test_sizes_are_taken_at_send_time():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    stream = module_weights(model)
    model[1].weight = nn.Parameter(torch.zeros(3, 2))
    next(stream)
    with pytest.raises(ManifestError, match=r"\[3, 2\].*\[2, 2\].*'1\.weight'"):
        next(stream)
    assert next(stream, None) is None
    refilled = nn.Linear(2, 2, bias=False)
    refilled.weight.data = torch.empty(0)
    early = module_weights(refilled)
    refilled.weight.data = torch.ones(2, 2)
    with pytest.raises(ManifestError):
        next(early)
    assert next(module_weights(refilled))[1].shape == (2, 2)


def test_dtype_changed_after_the_manifest():
    model = nn.Linear(2, 2)
    stream = module_weights(model)
    model.bfloat16()
    with pytest.raises(ManifestError, match="promised"):
        next(stream)


def test_parameter_removed_after_the_manifest():
    model = nn.Linear(2, 2)
    stream = module_weights(model)
    model.bias = None
    next(stream)
    with pytest.raises(ManifestError, match="no longer has"):
        next(stream)


def test_nothing_earlier_is_held_when_the_next_is_made():
    model = nn.Sequential(fused_experts(torch.randn(3, 4, 2), torch.randn(3, 2, 2)), nn.Linear(2, 2))
    earlier: list[weakref.ref] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        assert all(ref() is None for ref in earlier)
        full = tensor.detach().clone()
        earlier.append(weakref.ref(full))
        return full

    options = {"dtype_policy": DtypePolicy("bf16"), "split_experts": True}
    stream = plan_stream(model, gather, options)
    for _ in range(len(stream.manifest)):
        _, tensor = next(stream)
        earlier.append(weakref.ref(tensor))
        del tensor
    assert len(earlier) == 4 + 9 + 2
    assert next(stream, None) is None
    assert all(ref() is None for ref in earlier)


def test_streams_of_a_training_model_follow_it():
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    for _ in range(3):
        with torch.no_grad():
            for parameter in [*model.parameters(), *reference.parameters()]:
                parameter.mul_(2)
        sent = values(weight_stream_from(model))
        assert all(torch.equal(sent[name], tensor) for name, tensor in reference.state_dict().items())


def test_fsdp_1_is_refused():
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()
    wrapper.inner = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="fully_shard"):
        weight_stream_from(nn.Sequential(wrapper))
