"""TensorFerry beside its peers, measured in one invocation and in turns."""
