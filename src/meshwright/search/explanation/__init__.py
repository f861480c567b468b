"""What limits a plan, what would help, and how plans compare.

- `bottleneck`: what limits a plan now, in one sentence with its number
- `compare`: two plans side by side
- `explain`: `explain(job, plan)`
- `features`: what a plan chose, said briefly
- `html`: a found plan as a page of its own, and a sweep as another
- `improvements`: what would help most
- `runners_up`: runners-up
- `sweep`: `sweep(...)`
- `time_breakdown`: where the seconds of a step go, in the few groups people ask about
"""
