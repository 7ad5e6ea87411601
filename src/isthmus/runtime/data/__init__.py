"""The samples of a job: where they come from, their order, and checks of the user's data and loss.

Read the files in this order:

- `sources.py`: `open_samples`, which opens synthetic data, a text file or the user's dataset.
- `datasets.py`: samples from the user's code, checked and brought into the model's form.
- `sample_order.py`: which samples a job uses at each step, as a function of the seed.
- `contracts.py`: tries the user's data and loss on two samples before planning.

To add a kind of data, write a class that implements `Samples` in `sources.py` and return it from `open_samples` there.
"""
