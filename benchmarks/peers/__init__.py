"""What other libraries do in the rows `peers-*`, each in a process of its own with Python from .venv-peers."""
