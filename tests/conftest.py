"""Plugins that only the tests of our own plugin need."""

pytest_plugins = ("pytester",)
