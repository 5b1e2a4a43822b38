"""A notebook as one HTML page with its pictures inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

_PAGE = """\
{%- extends 'lab/index.html.j2' -%}
{% block data_png scoped %}
<div class="jp-RenderedImage jp-OutputArea-output {{ extra_class }}">
<img src="data:image/png;base64,{{ output.data['image/png'] | escape_html }}"
 alt="{{ (output | get_metadata('alt', 'image/png') or '') | escape_html }}">
</div>
{% endblock %}
{% block data_svg scoped %}
<div class="jp-RenderedSVG jp-OutputArea-output {{ extra_class }}" data-mime-type="image/svg+xml">
<img src="data:image/svg+xml;base64,{{ output.data['image/svg+xml'] | text_base64 | escape_html }}"
 alt="{{ (output | get_metadata('alt', 'image/svg+xml') or '') | escape_html }}">
</div>
{% endblock %}
"""


def to_html(notebook: NotebookNode, path: Path) -> str:
    """One page, pictures inside. Their alternative text is the output metadata {"image/png": {"alt": ...}}."""
    from nbconvert import HTMLExporter

    # outputs are inside the page in any case; embed_images would rewrite Markdown and unfold the solutions
    exporter = HTMLExporter(template_name="lab", raw_template=_PAGE)
    resources = {"metadata": {"name": path.stem, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return page
