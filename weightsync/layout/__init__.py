"""Who holds which region of which tensor, and the plan that moves every byte once. Pure: no I/O.

- `regions`: boxes of a tensor.
- `pieces`: the layout of one side: for each tensor, which rank has which box, and where in its memory.
- `holdings`, `megatron`: what policy ranks hold. `destinations`: what rollout ranks store.
- `families`: the tensors of a model, from its ``config.json``.
- `plan`, `balance`, `descriptors`: from two layouts to copies, to balanced senders, to arrays of addresses.
- `estimate`: tensors, bytes, batches, links and seconds of a plan.
"""
