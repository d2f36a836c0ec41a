"""What the op promises under torch.compile and beside torch's other machinery."""
