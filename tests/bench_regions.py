"""Seconds of Python that a refit by regions costs where there are very many tensors and regions.

Run ``python -m tests.bench_regions``: a mixture of experts of 45,000 tensors, from PP x EP policy ranks to
rollout ranks that store a part of each of them: 405,000 regions. No weights are moved: what is timed is what
Python does.
"""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager

import numpy as np
import torch

from weightsync.engines.regions.digests import RowDigests
from weightsync.engines.regions.incoming import Incoming, packed_spans, spans
from weightsync.engines.regions.outgoing import Outgoing, Packing
from weightsync.engines.regions.plan import RegionPlan
from weightsync.layout.regions import Box
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest

HIDDEN, INNER, EXPERTS = 128, 288, 256


def manifest_of(layers: int) -> WeightManifest:
    specs = []
    for layer in range(layers):
        specs.append(TensorSpec(f"layers.{layer}.o_proj", (HIDDEN, INNER), "bfloat16"))
        for expert in range(EXPERTS):
            name = f"layers.{layer}.experts.{expert}"
            specs += [
                TensorSpec(f"{name}.{part}_proj", (INNER, HIDDEN), "bfloat16") for part in ("gate", "up")
            ]
            specs.append(TensorSpec(f"{name}.down_proj", (HIDDEN, INNER), "bfloat16"))
    return WeightManifest.build(specs)


def policy_table(manifest, layers, rank, pp, ep) -> RankTable:
    """A stage of the layers, and a part of their experts, each tensor whole in a storage of its own."""
    builder = TableBuilder(manifest)
    stage, mine = rank // ep, rank % ep
    per_stage, per_rank = -(-layers // pp), EXPERTS // ep
    names = []
    for layer in range(stage * per_stage, min((stage + 1) * per_stage, layers)):
        names.append(f"layers.{layer}.o_proj")
        for expert in range(mine * per_rank, (mine + 1) * per_rank):
            names += [f"layers.{layer}.experts.{expert}.{p}_proj" for p in ("gate", "up", "down")]
    for name in names:
        shape = (HIDDEN, INNER) if name.endswith(("o_proj", "down_proj")) else (INNER, HIDDEN)
        builder.add(name, [HeldBox(builder.add_storage(name, shape, "bfloat16"), Box.whole(shape))])
    return builder.build()


def rollout_table(manifest, layers, rank, tp) -> RankTable:
    """Parts of all experts, fused to two storages a layer."""
    builder, part = TableBuilder(manifest), INNER // tp
    lo, hi = rank * part, (rank + 1) * part
    for layer in range(layers):
        o = builder.add_storage(f"layers.{layer}.o_proj", (HIDDEN, part), "bfloat16")
        w13 = builder.add_storage(f"layers.{layer}.w13", (EXPERTS, 2 * part, HIDDEN), "bfloat16")
        w2 = builder.add_storage(f"layers.{layer}.w2", (EXPERTS, HIDDEN, part), "bfloat16")
        builder.add(f"layers.{layer}.o_proj", [HeldBox(o, Box((0, lo), (HIDDEN, hi)))])
        for expert in range(EXPERTS):
            name, at = f"layers.{layer}.experts.{expert}", expert * 2 * part * HIDDEN
            rows = Box((lo, 0), (hi, HIDDEN))
            builder.add(f"{name}.gate_proj", [HeldBox(w13, rows, at)])
            builder.add(f"{name}.up_proj", [HeldBox(w13, rows, at + part * HIDDEN)])
            builder.add(
                f"{name}.down_proj", [HeldBox(w2, Box((0, lo), (HIDDEN, hi)), expert * HIDDEN * part)]
            )
    return builder.build()


@contextmanager
def timed(what: str, regions: int | None = None):
    started = time.process_time()
    yield
    seconds = time.process_time() - started
    each = f"  {seconds / regions * 1e6:6.2f} us a region ({regions})" if regions else ""
    print(f"{what:44s} {seconds:7.2f} s{each}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, default=58)
    options.add_argument("--pp", type=int, default=4)
    options.add_argument("--ep", type=int, default=4)
    options.add_argument("--tp", type=int, default=9)
    chosen = options.parse_args()
    run(chosen.layers, chosen.pp, chosen.ep, chosen.tp)


def run(layers: int, pp: int, ep: int, tp: int) -> None:
    torch.set_num_threads(1)
    manifest = manifest_of(layers)
    with timed("tables made, all ranks"):
        policy = [policy_table(manifest, layers, rank, pp, ep) for rank in range(pp * ep)]
        rollout = [rollout_table(manifest, layers, rank, tp) for rank in range(tp)]
    with timed("tables as bytes, all ranks"):
        data = [table.encode() for table in (*policy, *rollout)]
    with timed("tables read, all ranks"):
        tables = [RankTable.decode(each) for each in data]
    plan = RegionPlan(manifest, tuple(tables[: len(policy)]), tuple(tables[len(policy) :]))
    with timed("which tensors go whole"):
        _ = plan.whole
    with timed("plan (both layouts joined, copies chosen)"):
        reshard = plan.reshard
    print(f"  {len(manifest)} tensors, {reshard.regions} regions", flush=True)
    with timed("rows of one rollout rank"):
        rows = plan.rows(0)
    print(f"  {len(rows)} rows", flush=True)
    lent = [np.ones(len(table.storages), bool) for table in plan.policy]
    bucket = 64 << 20
    senders = plan.senders(0)
    with timed("what one rollout rank reads (Incoming)"):
        incoming = Incoming.of(
            plan, 0, {s: lent[s] for s in senders}, np.ones(len(tables[-1].storages), bool), bucket
        )
    readers = [t for t in range(tp) if reshard.links[0, t]]
    with timed("what one policy rank gives (Outgoing)"):
        outgoing = Outgoing.of(plan, 0, readers, lent[0], bucket)
    read_all(incoming)
    digest_all(incoming, plan.rollout[0])
    pack_all(plan, outgoing, bucket)


def read_all(incoming: Incoming) -> None:
    """Time what a rollout rank does for each region, but for the read itself."""
    parts = [
        (rows, where[rank])
        for name in ("lent", "packed")
        for batch in incoming.batches
        for rank, rows in getattr(incoming, name).items()
        if rank in (where := getattr(batch, name))
    ]
    count = sum(len(rows.select(part)) for rows, part in parts)
    with timed("  reading: spans of all batches", count):
        for rows, part in parts:
            some = rows.select(part)
            spans(some, some.source_offset, some.target_offset)
            packed_spans(some, some.source_offset, some.target_offset)


def digest_all(incoming: Incoming, table: RankTable) -> None:
    """Time the digests of what a rollout rank has read; the bytes are hashed, too."""
    flats = [torch.zeros(each.numel, dtype=torch.bfloat16) for each in table.storages]
    count = sum(len(rows) for rows in incoming.lent.values())
    with timed("  checking: digests of what was lent", count):
        found = RowDigests(flats.__getitem__)
        for rows in incoming.lent.values():
            columns = (rows.target_storage, rows.target_offset, rows.nbytes, rows.count, rows.target_step)
            for row in np.stack(columns, axis=1).tolist():
                found.of(*row)


def pack_all(plan: RegionPlan, outgoing: Outgoing, bucket_size: int) -> None:
    """Time what a policy rank does for each row that it packs."""
    table = plan.policy[0]
    flats = [torch.zeros(each.numel, dtype=torch.bfloat16) for each in table.storages]
    buffer = torch.zeros(bucket_size, dtype=torch.uint8)
    count = sum(len(bucket.items) for bucket in outgoing.buckets)
    if not count:
        return
    with timed("  packing: views, the first time", count):
        packings = [Packing(b, buffer, flats.__getitem__, plan.dtypes) for b in outgoing.buckets]
    with timed("  packing: every time (bytes copied, too)", count):
        for packing in packings:
            packing.run()


if __name__ == "__main__":
    main()
