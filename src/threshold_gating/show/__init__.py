"""Pictures and pages: plain records in; SVG, HTML and matplotlib out."""
