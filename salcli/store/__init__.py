"""Files of a project: paths, formats, atomic writes, lineage."""
