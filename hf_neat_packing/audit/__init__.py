"""Measure what a model does with packed rows: every document alone is the truth."""
