"""Adapters: other frameworks use regions and publications through interfaces of their own.

Import the module that you need: it needs that framework, and says what to install. docs/guides/integrations.md shows
each in a program.
"""
