"""Rules: one row an operator, which of its dimensions are one loop index and how they divide."""

from autoplan.rules.registry import DEFAULT, Registry, register_rule, signature
from autoplan.rules.signature import Call, Inner, Signature

__all__ = ["DEFAULT", "Call", "Inner", "Registry", "Signature", "register_rule", "signature"]
