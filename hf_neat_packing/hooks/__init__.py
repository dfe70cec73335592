"""Removable forward hooks: nothing outside the module that carries one is changed."""
