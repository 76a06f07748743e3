"""Triton kernels: the same bytes as `halfbyte.reference`, at memory speed. The two never import each other.

`backend` is the door: what ops calls, under the names of the reference. It asks the rooms behind it, each a role:

    device/       device functions that kernels are made of: casts, scales, loads, rotations, maxima, Philox, tiles
    amax/         the largest finite magnitudes of operands, plain, rotated, of groups
    quantize/     codes and scales, along rows (lines), in both orientations (both), of 16x16 tiles (strips), of experts
    gemm/         products: dense, grouped, and those of FP4 tensor cores (native)
    unpack/       values of stored operands, transposes, other orders of scales
    fused/        norms and activations that hand over the amaxes of what they write
    master_cast/  primary weights out of pieces of their fp32 masters

Which kernel serves a request, with which tile and why, is chosen in tables: `route` says how, each room has its own
(`route.py` and others that end so). A file holds a kernel and its launcher, which is handed the choice, allocates and
launches. Rooms import one way only, a contract of `make check`: device serves all of them, amax and unpack serve the
rest. Launchers run once for each request: `prepared` records what they did, and repeats it (`launch` is one
launch; docs/internals/host.md). `target` is
the GPU that kernels are launched for, `record` lists the launches for GPUs that are not here (`scenarios` has the
calls), `groups` says where the tokens of experts lie. Kernels address in int64, divide with `tl.div_rn`, and are
compiled with fusion off wherever a byte depends on a rounding.
"""
