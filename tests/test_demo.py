"""The demo's pure parts: task, algorithm, configuration, verdict, report."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import weightsync
from examples.grpo import grpo, model, report, task, verdict
from examples.grpo.config import CheckSettings, load_config
from weightsync.cli import demo
from weightsync.config import load_refit_config
from weightsync.errors import ConfigurationError, MissingDependencyError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "grpo"
CHECK = CheckSettings(logprob_tolerance=1e-3, reward_rise=0.2)


class Characters:
    """A tokenizer with one token a character; the stop mark is token 0."""

    def encode(self, text: str) -> list[int]:
        return [0] if text == "<|im_end|>" else [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids if token)


def completion(text: str, ended: bool = True) -> task.Completion:
    token_ids = [ord(character) for character in text]
    return task.Completion(token_ids, [0.0] * len(token_ids), ended)


# Tasks.


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("11", True, 1.0),
        ("4 + 7 = 11", True, 1.0),
        ("11", False, 0.8),
        ("12", True, 0.2),
        ("11 or 12", False, 0.0),
        ("-11", True, 0.2),
        ("eleven", True, 0.2),
        ("", False, 0.0),
    ],
)
def test_arithmetic_reward(text, ended, expected):
    prompt = task.Prompt([], answer=11)
    assert task.ArithmeticTask(Characters()).reward(prompt, completion(text, ended)) == pytest.approx(
        expected
    )


def test_arithmetic_never_trains_on_held_out_pairs():
    arithmetic = task.ArithmeticTask(Characters())
    held_out = {prompt.text for prompt in arithmetic.held_out_prompts()}
    trained = {prompt.text for prompt in arithmetic.sample_prompts(1000, random.Random(0))}
    assert len(held_out) == 20
    assert len(trained) == 61
    assert not held_out & trained
    assert held_out == {prompt.text for prompt in task.ArithmeticTask(Characters()).held_out_prompts()}
    assert arithmetic.stop_token_ids == [0]


def test_arithmetic_prompts_of_one_batch_do_not_repeat():
    prompts = task.ArithmeticTask(Characters()).sample_prompts(61, random.Random(3))
    assert len({prompt.text for prompt in prompts}) == 61
    assert all(f"{prompt.answer}" and 2 <= prompt.answer <= 18 for prompt in prompts)


@pytest.mark.parametrize(
    ("last", "tokens", "expected"),
    [(1, [0, 127, 3, 4], 1.0), (1, [128, 511, 3, 4], 0.5), (2, [384, 511, 383, 0], 0.5), (2, [], 0.0)],
)
def test_token_class_reward(last, tokens, expected):
    got = task.TokenClassTask(512).reward(task.Prompt([9, last], last), task.Completion(tokens, [], False))
    assert got == expected


def test_token_class_prompts():
    tokens = task.TokenClassTask(512)
    prompts = tokens.sample_prompts(16, random.Random(0))
    assert {len(prompt.token_ids) for prompt in prompts} == {6}
    assert [prompt.token_ids[-1] for prompt in prompts] == [1, 2] * 8
    assert all(3 <= token < 512 for prompt in prompts for token in prompt.token_ids[:-1])
    assert tokens.held_out_prompts() == task.TokenClassTask(512).held_out_prompts()


# The algorithm.


def test_advantages_are_normalised_within_each_group():
    advantages = grpo.group_advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0], [3.0, 3.0, 3.0, 7.0]]))
    torch.testing.assert_close(advantages[0], torch.tensor([-1.0, 1.0, -1.0, 1.0]))
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(dim=1, unbiased=False), torch.ones(2))


def test_a_flat_group_teaches_nothing_even_with_rounding_noise():
    rewards = torch.tensor([[0.8, 0.8, 0.8 + 6e-8, 0.8], [0.0, 1.0, 0.0, 1.0]])
    assert grpo.group_advantages(rewards)[0].tolist() == [0.0] * 4


def test_reference_kl_is_never_negative_and_zero_for_equal_models():
    logprobs = torch.tensor([-0.1, -2.0, -3.0])
    assert grpo.reference_kl(logprobs, logprobs).tolist() == [0.0] * 3
    assert bool((grpo.reference_kl(logprobs, logprobs + torch.tensor([0.5, -0.5, 1.0])) > 0).all())


def test_reference_kl_estimates_the_true_kl():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(20, generator=generator).log_softmax(0)
    reference = torch.randn(20, generator=generator).log_softmax(0)
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    estimate = grpo.reference_kl(policy[samples], reference[samples]).mean()
    exact = (policy.exp() * (policy - reference)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=0.03)


def test_objective_is_clipped_on_the_side_that_would_gain():
    old = torch.zeros(4, 1)
    new = torch.tensor([[math.log(1.5)], [math.log(0.5)], [math.log(1.5)], [math.log(0.5)]])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    got = grpo.clipped_objective(new, old, advantages, 0.2).squeeze(1)
    torch.testing.assert_close(got, torch.tensor([1.2, 0.5, -1.5, -0.8]))


def sample(prompt, tokens, logprobs, advantage=0.0):
    return grpo.Sample(prompt, tokens, logprobs, advantage)


def test_collate_pads_prompts_left_and_completions_right():
    batch = grpo.Batch.collate(
        [sample([5, 6, 7], [8], [-1.0], 2.0), sample([9], [10, 11], [-2.0, -3.0], -2.0)]
    )
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 0], [0, 0, 9, 10, 11]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3], [0, 0, 0, 1, 2]]
    assert batch.targets.tolist() == [[8, 0], [10, 11]]
    assert batch.mask.tolist() == [[True, False], [True, True]]
    assert batch.sampler_logprobs.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    assert batch.advantages.tolist() == [2.0, -2.0]


def test_loss_gradient_is_the_policy_gradient_and_padding_counts_for_nothing():
    batch = grpo.Batch.collate([sample([1], [2, 3], [-1.0, -1.5], 1.0), sample([1], [4], [-0.5], -1.0)])
    logprobs = batch.sampler_logprobs.clone().requires_grad_()
    reference = torch.where(batch.mask, batch.sampler_logprobs, torch.tensor(-50.0))
    parts = grpo.grpo_loss(batch, logprobs, reference, clip_ratio=0.2, kl_coefficient=0.1)
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(0.0, abs=1e-7)
    assert parts.kl.item() == 0.0
    # Mean over two samples of the mean over their tokens of -advantage.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25, -0.25], [0.5, 0.0]]))


def test_kl_term_pulls_back_to_the_reference():
    batch = grpo.Batch.collate([sample([1], [2], [-1.0])])
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    parts = grpo.grpo_loss(batch, logprobs, torch.tensor([[-2.0]]), clip_ratio=0.2, kl_coefficient=0.5)
    parts.loss.backward()
    assert parts.kl.item() == pytest.approx(math.exp(-1) - 1 + 1)
    assert logprobs.grad.item() == pytest.approx(0.5 * (1 - math.exp(-1)))


def test_token_logprobs_are_log_softmax_of_the_targets():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 6, 3], [2, 2, 5]])
    expected = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(grpo.token_logprobs(logits, targets), expected)


def test_gap_ignores_padding_and_keeps_nan():
    batch = grpo.Batch.collate([sample([1], [2, 3], [-1.0, -2.0]), sample([1], [4], [-3.0])])
    gap = grpo.LogprobGap.measure(batch, torch.tensor([[-1.5, -2.0], [-3.25, 99.0]]))
    assert (gap.largest, gap.total, gap.tokens) == (0.5, 0.75, 3)
    assert gap.mean == 0.25
    nan = grpo.LogprobGap(math.nan, math.nan, 1)
    assert math.isnan(grpo.LogprobGap.combine([gap, nan]).largest)
    assert math.isnan(grpo.LogprobGap.combine([nan, gap]).largest)
    assert grpo.LogprobGap.combine([gap, grpo.LogprobGap(2.0, 2.0, 1)]) == grpo.LogprobGap(2.0, 2.75, 4)


# Configuration.


@pytest.mark.parametrize("name", ["smollm2.yaml", "tiny-qwen3.yaml"])
def test_shipped_configurations_load(name):
    config = load_config(EXAMPLES / name, steps=7, seed=5)
    assert (config.grpo.steps, config.seed) == (7, 5)
    assert config.check.logprob_tolerance == 1e-3
    assert config.policy.workers == 2
    refit = load_refit_config(config.refit_source)
    assert (refit.transport, refit.device) == ("nixl", "cpu")
    assert config.vllm_kwargs["max_num_batched_tokens"] == 4096


def test_a_transport_and_what_it_divides_are_chosen_on_the_command_line():
    config = load_config(EXAMPLES / "tiny-qwen3.yaml", transport="nixl", shard_weights="auto")
    assert load_refit_config(config.refit_source).sharding == "auto"
    config = load_config(EXAMPLES / "tiny-qwen3.yaml", transport="ipc", shard_weights="auto")
    with pytest.raises(ConfigurationError, match="shard_weights"):
        load_refit_config(config.refit_source)


def write_config(tmp_path, **changes):
    text = (EXAMPLES / "tiny-qwen3.yaml").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("  clip_ratio:", "  clip_ration:", "clip_ration"),
        ("task: token-class", "task: poetry", "grpo.task"),
        ("micro_batch_size: 64", "micro_batch_size: 48", "multiple"),
        ("steps: 30", "steps: 2", "grpo.steps"),
        ("seed: 0", "seed: [", "cannot read"),
    ],
)
def test_wrong_configuration_is_named(tmp_path, old, new, named):
    with pytest.raises(ConfigurationError, match=named):
        load_config(write_config(tmp_path, change=(old, new)))


def test_missing_configuration_file(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


def test_configuration_that_is_no_mapping(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigurationError, match="mapping"):
        load_config(tmp_path / "list.yaml")


# Checkpoints.


def test_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="smollm2-135m-instruct"):
        model.prepare_checkpoint("gpt-17", tmp_path)


def test_missing_model_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"weightsync\[demo\]"):
        model.prepare_checkpoint(model.SMOLLM2, tmp_path, say=lambda text: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_tiny_checkpoint_is_made_once(tmp_path):
    said = []
    first = model.prepare_checkpoint(model.TINY_QWEN3, tmp_path, said.append)
    again = model.prepare_checkpoint(model.TINY_QWEN3, tmp_path, said.append)
    assert first == again
    assert len(said) == 1
    assert isinstance(model.make_task("token-class", first), task.TokenClassTask)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny-qwen3"]
    assert model.prepare_checkpoint(str(first), tmp_path) == first


# Verdict and report.


def record(step, reward, difference=1e-6, refit=True):
    return verdict.StepRecord(
        step=step, reward=reward, loss=0.01, kl=0.02, difference=difference, mean_difference=difference / 10,
        policy_version=step - 1, rollout_version=step - 1 if refit else 0,
        refit_seconds=0.5 if refit else None, refit_bytes=1_890_000 if refit else None,
        generate_seconds=1.0, train_seconds=2.0, seconds=3.5,
    )  # fmt: skip


def result(rewards=(0.1, 0.2, 0.4, 0.5, 0.8, 0.9), *, refit=True, difference=1e-6):
    steps = [record(n, reward, difference, refit) for n, reward in enumerate(rewards, start=1)]
    held_out = verdict.HeldOut(accuracy=0.5, difference=1e-6)
    return verdict.RunResult("tiny", "token-class", 0, refit, 1e-3, steps, held_out, held_out, 42.0)


def test_a_good_run_passes():
    good = result()
    assert good.reward_rise == pytest.approx(0.7)
    assert verdict.judge(good, CHECK).passed


def test_a_flat_reward_fails():
    outcome = verdict.judge(result((0.5, 0.4, 0.5, 0.6, 0.5, 0.5)), CHECK)
    assert not outcome.passed
    assert "did not rise" in outcome.reasons[0]
    assert "+0.050" in outcome.reasons[0]


@pytest.mark.parametrize("bad", [2e-3, math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 3, 5])
def test_one_exceeded_difference_fails(bad, where):
    run = result()
    run.steps[where] = replace(run.steps[where], difference=bad)
    outcome = verdict.judge(run, CHECK)
    assert len(outcome.reasons) == 1
    assert "refit is broken" in outcome.reasons[0]


def test_the_difference_after_the_last_refit_counts():
    run = result()
    run.held_out_after = verdict.HeldOut(accuracy=1.0, difference=0.5)
    assert not verdict.judge(run, CHECK).passed


def test_switched_off_refit_is_explained():
    outcome = verdict.judge(result(refit=False, difference=1.7), CHECK)
    assert "what a missed refit looks like" in outcome.reasons[0]


def test_step_line_says_everything_and_marks_an_exceeded_difference():
    line = report.step_line(record(3, 0.25), 1e-3)
    for part in ("step   3", "reward 0.250", "loss +0.01000", "refit 0.50 s 1.9 MB", "1.00e-06"):
        assert part in line
    assert "bold red" not in line
    off = report.step_line(record(3, 0.25, 1.7, refit=False), 1e-3)
    assert "refit off: policy at version 2, vLLM at 0" in off
    assert "1.70e+00 > 1e-03" in off


def test_summary_table_and_result_file(tmp_path):
    run = result()
    outcome = verdict.judge(run, CHECK)
    console = Console(record=True, width=80, file=io.StringIO())
    report.print_summary(console, run, outcome)
    text = console.export_text()
    assert "PASSED" in text
    assert "1,890,000" in text
    assert "50% before, 50% after" in text
    report.write_result(tmp_path / "out" / "result.json", run, outcome)
    data = json.loads((tmp_path / "out" / "result.json").read_text())
    assert data["verdict"] == {"passed": True, "reasons": []}
    assert [step["refit_bytes"] for step in data["steps"]] == [1_890_000] * 6
    assert data["largest_difference"] == 1e-6
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result.json"]


@pytest.mark.slow
def test_plot_writes_a_png_even_for_a_difference_of_zero(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "out" / "demo.png", result(difference=0.0))
    data = (tmp_path / "out" / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


# Finding and starting it.


def test_actors_find_the_package_under_the_name_it_has_here():
    run = importlib.import_module("examples.grpo.run")
    assert run._import_root() == EXAMPLES.parent.parent


def test_a_bare_name_means_a_file_of_the_example(tmp_path, monkeypatch):
    run = importlib.import_module("examples.grpo.run")
    monkeypatch.chdir(tmp_path)
    assert run._find(Path("tiny-qwen3.yaml")) == EXAMPLES / "tiny-qwen3.yaml"
    assert run._find(Path("other/tiny-qwen3.yaml")) == Path("other/tiny-qwen3.yaml")
    Path("tiny-qwen3.yaml").write_text("own: file")
    assert run._find(Path("tiny-qwen3.yaml")) == Path("tiny-qwen3.yaml")


def test_samples_are_dealt_in_equal_numbers():
    workers = importlib.import_module("examples.grpo.workers")
    samples = [sample([n], [n], [0.0]) for n in range(5)]
    hands = workers.deal(samples, 3)
    assert [[each.prompt_ids[0] for each in hand] for hand in hands] == [[0, 3], [1, 4], [2, 0]]


def test_command_names_everything_that_is_missing(monkeypatch):
    found = importlib.util.find_spec
    absent = {"ray", "nixl", "transformers"}
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name in absent else found(name)
    )
    with pytest.raises(MissingDependencyError) as caught:
        demo.require_packages()
    assert "ray, nixl, transformers: pip install 'weightsync[ray,nixl,demo]'" in str(caught.value)


def test_command_finds_the_example_of_a_checkout():
    assert demo.load_example().HERE == EXAMPLES


def test_command_finds_the_example_of_a_wheel(tmp_path, monkeypatch):
    """As in an installed wheel: no checkout around the package, the example within it."""
    shutil.copytree(EXAMPLES, tmp_path / "_examples" / "grpo")
    monkeypatch.setattr(demo, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(weightsync, "__path__", [*weightsync.__path__, str(tmp_path)])
    run = demo.load_example()
    assert run.__name__ == "weightsync._examples.grpo.run"
    assert tmp_path / "_examples" / "grpo" == run.HERE
    assert run.DEFAULT_CONFIG.is_file()


def test_command_without_any_example(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_CHECKOUT", tmp_path)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="examples/grpo"):
        demo.load_example()
