"""Operators that know about ranks: what replaces a plain operator where one of its loops is divided and the plain
one on local operands would be wrong. `runtime.sharded_ops` lists them."""
