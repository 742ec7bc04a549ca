"""The stages: each is a function of declared inputs to declared outputs, for the CLI, DVC and Python alike.

`train_ood` also trains encoders (train-encoder). Two stages are elsewhere: detector/stage.py and report/summary.py.
No stages: `loading` reads what several of them need, `network_spec` says how a network is built, `embed` is the frozen
backbone of `prepare`, and `review` is a command's work.
"""
