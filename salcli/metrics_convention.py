"""The one sentence that stands under every table: FPR95 has two meanings in the field."""

FPR95_CONVENTION = (
    "FPR95: ID is positive, a higher score is more ID-like; the threshold is the highest that keeps at least "
    "95% of ID, FPR95 is the share of OOD at or above it."
)
