"""Loads the suite's pytest plugin for every run from this checkout."""

pytest_plugins = ["conformance.plugin"]
