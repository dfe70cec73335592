"""The demonstration: real documents to a trained model through `neat_varlen`, measured and checked."""
