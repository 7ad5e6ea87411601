"""The constants that steer the search, with what each does and why it has its value.

The measured reasons are rows of docs/log.md. A value without such a row was chosen by judgement, and the text says what
it weighs. What defines a scheme, a bound or a file format is no steering and stands beside the code that it belongs to.
"""

from __future__ import annotations

# How long a search goes on, in seconds of *effort*: the time that planning takes on a usual machine.

SMALL_EFFORT = 1.6
"""Default effort for up to `LARGE` devices. With 5, steps are 0.7 % shorter on average and planning takes three times
as long; with 0.8, they are 4.5 % longer (24 cases)."""

LEAST_LARGE_EFFORT, MOST_LARGE_EFFORT, DEVICES_AN_EFFORT = 5.0, 40.0, 200
"""Default effort for larger clusters: a second for so many devices, within these limits. With 1.6, steps of 128 devices
took up to 1.9 times as long; with 6 in place of 5, planning 1,024 devices took close to the ten seconds wanted."""

HASTY_SECONDS = 3.0
"""Limits of so many seconds or less, of the clock or of effort, use a fast mode, in which what promises most comes
first: the network is asked before the search has plans of its own, and schemes get a smaller part."""

FIRST_ROUND, ROUND_GROWTH, HASTY_ROUNDS = 1 / 16, 4.0, 3
"""Where somebody gives a budget: the first round's part of the default effort, the growth from round to round, and the
rounds before little promise counts too. The third round has exactly the default effort, so a budget that reaches it
finds the plan that is found without one; growth by four costs a third of the last round for all rounds before."""

SCHEMES_ENDING_EFFORT, LARGE_SCHEMES_ENDING, ENDING_PASSES = 20.0, 2.0, 3
"""Effort to search schemes to their end after the default effort (for large clusters: times the default one), and how
often the effort that some leave over is given to the others. A ratio to a scheme that was not searched to its end
flatters; for large clusters the end would take minutes, as long rings are slow to play."""

# The effort that pieces of work take, about, in seconds on a usual machine.

PRICE_EFFORT, PRICE_DEVICE_EFFORT, TASK_EFFORT = 4e-4, 2e-5, 2.5e-7
"""Pricing a plan: at least, for each device of the cluster, and for each task that is played."""

COPIES_PRICE_EFFORT = 3e-3
"""Pricing a plan of a large cluster through a few of its copies, besides its tasks."""

IDEA_EFFORT, STAGED_IDEA_EFFORT, VERSIONS_EFFORT = 1e-5, 1.5e-4, 2e-3
"""Making an idea at least, one of stages with its bound besides, and its versions with their cuts."""

LANE_EFFORT, PAIR_EFFORT, CUT_EFFORT = 3e-4, 1.6e-6, 1e-4
"""Timing a lane, arranging bundles for each pair of them, and cutting stages that are settled."""

PROGRAMME_EFFORT = 0.05
"""Writing and solving one integer programme of syncs."""

NETWORK_EFFORT, DRAFT_EFFORT = 3e-3, 3e-4
"""Asking the network once, and each draft that it is asked about. Without these efforts 42 plans were the same."""

# How a round of effort is divided. Each part is of what is left when the step begins.

SCHEMES_PART, HASTY_SCHEMES_PART = 0.4, 0.25
"""For the schemes, where a planner goes on from their plans. They give the search a good start; in the fast mode the
planner needs the larger part to get anywhere."""

IDEAS_PART = 0.5
"""Of a scheme: to make its ideas, so that as much is left to price those with the best bounds."""

COPY_PART = 0.9
"""Of the budget of a large cluster: to plan one copy; the rest is for pricing the plans of all copies."""

EXPLORE_PART = 0.92
"""Of `auto`: to search layouts; the rest is for duplicates and slices. With 0.95 slices were left out: steps of TAG's
transformer were 7 % longer."""

DIRECT_PART = 0.7
"""Of that, before layouts are made that talk over relays. Their bounds are optimistic: with relays from the start steps
were 31 % longer in one of six cases with missing links."""

DUPLICATES_PART = 0.4
"""Of what is left at the end, for duplicates; the rest is for slices, which would be left out otherwise."""

ONE_LANE_PART = 0.8
"""Of `split`: for its pipelines; the rest is for syncs, duplicates and slices."""

MAKE_PART = 0.5
"""To make pipelines before any of them is priced. When all were made first, nothing had been priced in time for 128
devices in four regions: 2.90 s a step in place of 1.73."""

FIRST_PART = 0.3
"""For the settings that people would try, and again for the syncs of their best."""

OWN_PART, PROPOSE_PART = 0.6, 0.4
"""For the search of its own before the network is asked, and for what the network proposes. A good plan at once would
end the search around lesser plans."""

CLIMB_PART, SHAPE_PART, POLISH_PART = 0.4, 0.5, 0.6
"""For each turn of changing settings, moving replicas between stages and polishing. The turns are repeated while they
gain, so no step may spend what the next one needs."""

EXACT_FIRST_PART, EXACT_LAST_PART, EXACT_POLISH_PART = 0.1, 0.1, 0.5
"""Of `exact`: for a start as `auto` makes it, for what is moved and synced in the end, and for polishing as a part of
that. A good start rules out most forms; the proof needs the rest."""

TREE_PART, TREE_POLISH_PART = 0.7, 0.6
"""Of `search` and `learned`: for the tree, and of the rest for polishing its best layouts."""

# How widely layouts are searched.

DEGREES = 3
"""Sizes of tensor groups that are tried, the smallest first."""

FIRST_PRICED, CHANGED_PRICED, WIDER_PRICED = 6, 24, 48
"""Settings that are priced: of one way to form lanes at first; of the changes of one setting; and of those that
promised too little at first, before everything is refined again."""

POOL, SHAPED = 10, 4
"""Settings whose changes are tried before the search gives up, and layouts whose replicas change places and that are
polished. Both grow while a search is `thorough` and something is left."""

KEPT = 1000
"""Plans that are remembered; more are never looked at again."""

GAIN = 0.999
"""Times the best: what counts as a gain. Smaller gains would repeat whole turns for nothing that can be measured."""

SYNCED, SYNC_GAIN, SYNC_CALLS = 3, 1.5, 12
"""Plans whose syncs are chosen by the integer programme; how far from the best they may be before; and the calls that
choosing takes about, without which it is not begun."""

DUPLICATED_ENDS, DUPLICATES_NEAR = 4, 1.1
"""Ends of stages that may be duplicated, tried for one plan; and times the best: the plans with duplicates whose syncs
are worth choosing anew."""

MOST_NEAREST = 24
"""Plans that are priced only to say what memory is missing where nothing fits."""

SCHEME_IDEAS, VERSIONS_NEAR = 400, 1.05
"""Ideas of one scheme that are tried, which is part of what a scheme is; and times the best: where an idea's first
version that fits is farther away, its others are left out. Trying all gave the same plans in 8.3 in place of 5.8 CPU
seconds."""

FORMS, SHAPES = 1_000_000, 100_000
"""Forms that `exact` lists for one size of tensor groups, and shapes of a lane; where there are more, nothing is
proven."""

# The tree search over drafts (`learned/tree_search.py` has the formula).

TREE_EXPLORE, TREE_DOUBTED = 0.7, 2.0
"""The weight of the prior against what was found, and how much larger it is where the prior is doubted altogether."""

TREE_TRUSTED, TREE_DOUBTING = 2, 0.02
"""Rounds in a row without a gain before the prior is doubted, and the doubt that each further one adds. With doubt and
more exploring, 5 of 6 hard held-out cases come near the best known; without, 2."""

TREE_DESCENTS = 8
"""Descents side by side, so that the network is asked about many drafts at once."""

TREE_KNOWN, TREE_FREE = 40, 200
"""Rounds in a row that bring nothing new, or price nothing, after which the tree is at its end."""

TREE_FEW = 2
"""Rounds in a row without a gain that end the tree where it only proposes. When proposals took 15 % of the effort until
nothing new came, five of 40 cases were 2 to 17 % slower."""

TREE_CLOSE = 1.25
"""Times the best: drafts for which other ways to sync are worth a call."""

EVEN_PART = 0.1
"""The part of a network's prior that is even, so that what it thinks impossible is tried in the end."""

# What is never played, as it would take too long.

MESSAGES_A_SECOND = 1e6
"""Messages that the simulator plays in a second, at least."""

PLAN_MESSAGES, SCHEME_MESSAGES = 10_000_000, 25_000_000
"""Messages of the rings of one plan (about ten seconds), and of all plans of one scheme."""

# How many copies a large cluster is planned as.

COPY_WORTH, COPY_TOO_LARGE = 0.02, 0.1
"""The part of the cluster's speed that may stay idle: for each halving of the small problem, and for each `LARGE`
devices that it has too many. This weighs time to plan against the step."""
