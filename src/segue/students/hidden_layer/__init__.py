"""The hidden layer of an MLP: the tensors that hold its units, proposed by their shapes and verified by calls of the module."""
