"""Tests on a CUDA device: `make gpu`."""
