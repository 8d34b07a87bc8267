"""Who holds which region of which tensor, and the plan that moves every byte once. Pure: no I/O.

- `regions`, `strided`: boxes of a tensor; boxes from the views that a traced load copies.
- `pieces`: the layout of one side: for each tensor, which rank has which box, and where in its memory.
- `plan`, `balance`, `descriptors`: from two layouts to copies, to balanced senders, to arrays of addresses.
- `holdings`: what ranks hold of a DTensor.
- `families`, `generic`: the tensors of a model, by its ``config.json`` or by their names.
- `parallel`, `megatron`, `sharded`, `destinations`: how ranks are arranged, and what those of a Megatron
  policy, of an FSDP2 policy and of vLLM have; `checks` says what to write where sizes do not fit.
- `tables`, `joining`: what one rank tells of its share, and one side's layout of what all ranks tell.
- `rows`, `groups`: a plan as arrays that both ends of a transfer make alike; storages that belong together.
- `estimate`: tensors, bytes, batches, links and seconds of a plan.
"""
