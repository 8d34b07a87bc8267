"""Refit by regions: each rollout rank reads what it stores from policy ranks that hold it, and no byte more.

- `plan`: from the tables of all ranks to who reads what, made alike on every rank.
- `outgoing`, `sender`: a policy rank lends its shards, and packs what cannot be read where it is.
- `incoming`, `receiver`: a rollout rank reads batches of whole parameters, in place or into a buffer.
- `reading`: what a transport has to be able to do.
- `engine`: a `BucketedCheckpointEngine` that moves by regions what can be, and the rest in buckets.
"""
