"""Methods of other papers, as baselines and plug-ins, each with what it alone uses."""
