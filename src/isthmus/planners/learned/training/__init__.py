"""Train the network of `learned`: `python -m isthmus.planners.learned.training`.

- `__main__.py`: the command: rounds of long searches and of training.
- `problems.py`: the random problems that it learns from.
- `record.py`: what is kept of a search.
- `collect.py`: one search and what it finds out.
- `records.py`: many searches in several processes, kept in a file.
- `lessons.py`: what the network should say, by a record.
- `fit.py`: the training itself.
"""
