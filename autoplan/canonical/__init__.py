"""Canonical form: small exact passes that turn an exported program into the graph that is planned.

Each pass maps a `Trace` to a `Trace` that computes the same loss, gradients and buffers:

    imported    exported program -> trace; no_grad and autocast regions written out as detach and casts
    functional  in-place operators, views and buffer writes -> pure operators and buffer updates
    tidy        no-ops removed, the many spellings of a view or a cast -> one
    fold        what depends on no input, parameter or random number -> constants without a batch dim
    attention   masks proved causal or empty -> is_causal or none; repeated heads -> enable_gqa
    lookup      one element of every row -> gather
    linear      biases and fused products -> product and sum; dropout -> the runtime's own
    affine      numbers added to scalars -> constants added to them
    loss        means over the batch -> sum over count
"""
