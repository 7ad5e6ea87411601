"""Reports for people: clusters, models and plans as text, and a plan as one page of HTML.

In reading order, first the text:

- `columns.py`: aligned columns, cut lines, percentages and ratios.
- `class_names.py`: names for classes of equal devices.
- `cluster_text.py`: a cluster as text.
- `model_text.py`: a captured model as text.
- `plan_text.py`: a priced plan as text.
- `choice_text.py`: what `isthmus plan` prints.
- `outcomes.py`: the outcomes of the schemes, in words.
- `times.py`: where the times come from.
- `limits.py`: what limits a plan, in words.
- `remarks.py`: warnings and notes about a plan that was priced again.
- `unused_devices.py`: why devices are not used.

Then the page:

- `html.py`: the whole page, section by section.
- `markup.py`: HTML and SVG with everything escaped.
- `headline.py`: its first lines; `footer.py`: its last lines.
- `bars.py`: bars for memory, time and schemes.
- `map.py`: the cluster as a map; `cards.py` draws its cards, and `layout.py` places them.
- `chart.py`: a value over the steps of a run; `run.py`: the section of a run.
- `packed.py`: the timeline as data for the page's script.
- `page/`: the frame, styles and scripts of the page.
- `chrome_trace.py`: the timeline as a Chrome trace, in a file of its own.

To add a section of the page, write a function that returns `Markup`, call it in `report_html` (`html.py`), and name its
place in `page/frame.html`.
"""
