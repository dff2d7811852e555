"""What the library costs, measured against the wire and against its peers: ``python -m benchmarks [--quick] [WORD...]``.

Every figure is a ratio or a median within one run: what is compared takes turns in rounds, and the spread over the rounds is
shown with it. Nothing here is compared with a figure of another run or machine.
"""
