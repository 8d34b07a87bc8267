"""The sending side: the policy worker's mixin and the weight sources."""
