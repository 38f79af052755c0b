"""The device side of a step. `runner.torch_runner` runs a model; `runner.fake` needs none."""
