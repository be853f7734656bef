"""Export of converted networks to the tools that people deploy with."""

AUDITED_AS = "machinery"  # see conversion.audit
