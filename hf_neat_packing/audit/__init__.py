"""Measure what a model does with packed rows: every document alone is the truth."""

from .model_audit import assert_isolated, audit_model
from .result import AuditReport, Check, Finding

__all__ = ["AuditReport", "Check", "Finding", "assert_isolated", "audit_model"]
