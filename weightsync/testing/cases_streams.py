"""Conformance: every kind of weight stream comes through with names, shapes, dtypes and bytes."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.engines.base import CAPABILITIES
from weightsync.testing.crew import ThreadCrew
from weightsync.testing.oracle import check
from weightsync.testing.streams import STREAMS
from weightsync.testing.suite import Suite
from weightsync.testing.work import MIDDLE, REPEAT, Plan

_LONG = "10,000 tiny ones"
_STREAMS = [pytest.param(name, marks=[pytest.mark.slow] if name == _LONG else []) for name in STREAMS]
_PLAIN = (str, bytes, int, float, bool, type(None))


class StreamCases(Suite):
    """One policy and one rollout rank in this process."""

    def test_declarations(self) -> None:
        """What the engine lacks is known by that name, and has a reason."""
        for capability, reason in self.lacks().items():
            check(
                capability in CAPABILITIES,
                f"lacks {capability!r}, which is none of {', '.join(CAPABILITIES)}",
            )
            check(isinstance(reason, str) and reason.strip(), f"lacks {capability!r} without a reason")

    def test_metadata_are_plain_data(self) -> None:
        """`prepare` returns what every RPC layer carries: strings, numbers, bytes, lists and dicts."""
        engine = self.make()
        try:
            complaint = _not_plain(engine.prepare(), "prepare()")
        finally:
            engine.close()
        check(not complaint, complaint)

    @pytest.mark.parametrize("stream", _STREAMS)
    def test_every_byte_comes(self, pair: ThreadCrew, stream: str) -> None:
        """Bytes are compared, in destinations that were poisoned beforehand."""
        pair.works(Plan(stream, seed=1))

    @pytest.mark.parametrize("stream", ["mixed", "nothing", "around the bucket"])
    def test_every_byte_comes_of_a_stream_with_a_manifest(self, pair: ThreadCrew, stream: str) -> None:
        """The same of a generator that announces what it will bring."""
        pair.works(Plan(stream, seed=2, manifest=True))

    def test_a_bucket_that_is_no_multiple_of_an_item(self) -> None:
        """The end of a bucket cuts through items of every size."""
        with self.crew_of((1, 1), bucket_size=self.bucket_size + 13) as crew:
            crew.works(Plan("wide items"))
            crew.works(Plan("around the bucket"))
            crew.works(Plan("all dtypes"))

    def test_names_shapes_and_values_change_from_refit_to_refit(self, pair: ThreadCrew) -> None:
        """Each refit describes itself: nothing is taken from the one before."""
        for stream, seed in (("mixed", 0), ("mixed", 1), ("mixed", 3), ("tied", 0), ("nothing", 0)):
            pair.works(Plan(stream, seed=seed))
        for seed in (1, 2, 1):
            pair.works(Plan("plain", seed=seed, manifest=bool(seed % 2)))

    def test_a_stream_that_was_consumed_already(self, pair: ThreadCrew) -> None:
        """It is an empty one: the refit ends well, and brings nothing."""
        pair.works(Plan("plain", spent=True))
        pair.works(Plan("plain"))

    def test_a_name_that_comes_twice(self, pair: ThreadCrew) -> None:
        """It is an error on both sides; the next refit works."""
        self.need("checks")
        self.require_failed(
            pair,
            pair.refit(Plan("plain"), {("policy", 0): Plan("plain", fault=REPEAT, place=MIDDLE)}),
        )
        pair.recovers()

    def test_a_manifest_check_comes_first_and_may_refuse(self, pair: ThreadCrew) -> None:
        """Where an engine has the hook, it is called once, with all names, before the first batch."""
        receiver = pair.rollout[0].engine
        seen: list[Any] = []
        receiver.manifest_check = seen.append
        try:
            pair.works(Plan("mixed", manifest=True))
        finally:
            receiver.manifest_check = None
        if not seen:
            return  # an optional hook
        check(len(seen) == 1, f"manifest_check was called {len(seen)} times in one refit")
        names = [name for name, _ in STREAMS["mixed"](self.bucket_size, 0)]
        check(sorted(seen[0].names) == sorted(names), "manifest_check was not given the stream's names")
        self._refuses(pair)

    def _refuses(self, pair: ThreadCrew) -> None:
        def refuse(manifest: object) -> None:
            raise ValueError("the model takes other tensors")

        pair.rollout[0].engine.manifest_check = refuse
        try:
            outcomes = pair.refit(Plan("plain", manifest=True))
        finally:
            pair.rollout[0].engine.manifest_check = None
        self.require_failed(pair, outcomes, at="rollout rank 0", kind="ValueError")
        pair.recovers()


def _not_plain(value: object, where: str) -> str:
    """Return what is not plain in a value; empty if all is."""
    if isinstance(value, dict):
        parts = [(key, f"a key of {where}") for key in value]
        parts += [(entry, f"{where}[{key!r}]") for key, entry in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
    else:
        return "" if isinstance(value, _PLAIN) else f"{where} is a {type(value).__name__}, no plain data"
    return next((complaint for part in parts if (complaint := _not_plain(*part))), "")
