"""Find where the documents of a packed row reach each other in a model, and keep them apart with hooks."""

from .isolate import Applied, IsolationReport, isolate, isolation_of

__all__ = ["Applied", "IsolationReport", "isolate", "isolation_of"]
