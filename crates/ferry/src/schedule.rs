//! [`Schedule`]: when a snapshot is due, and which ones are not needed any more.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use ferry_object::{SNAPSHOTS_MAX, Snapshot};

/// What the names of scheduled snapshots begin with. No other snapshot is ever deleted by a
/// schedule.
pub const PREFIX: &str = "scheduled-";

/// How a name goes on behind [`PREFIX`]: digits stand for digits.
const DATE: &[u8] = b"0000-00-00-000000";

const DAY: u64 = 86_400;

/// A time of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Period {
    Hourly,
    Daily,
    /// Weeks begin on Monday.
    Weekly,
}

impl Period {
    const ALL: [(&str, Self); 3] =
        [("hourly", Self::Hourly), ("daily", Self::Daily), ("weekly", Self::Weekly)];

    /// Which of these periods a time is in.
    fn number(self, secs: u64) -> u64 {
        match self {
            Self::Hourly => secs / 3600,
            Self::Daily => secs / DAY,
            // The first day of 1970 was a Thursday.
            Self::Weekly => (secs / DAY + 3) / 7,
        }
    }
}

/// How many snapshots of each period stay, as `hourly=24,daily=7,weekly=4`. There is a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule(BTreeMap<Period, usize>);

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rules = BTreeMap::new();
        for rule in text.split(',') {
            let (name, count) = rule.split_once('=').unwrap_or((rule, ""));
            let period = Period::ALL.iter().find(|(known, _)| *known == name);
            let count = count.parse().ok().filter(|count| (1..SNAPSHOTS_MAX).contains(count));
            let (Some((_, period)), Some(count)) = (period, count) else {
                return Err(format!(
                    "{rule:?}: hourly=N, daily=N or weekly=N is wanted, N from 1 to {}; as in hourly=24,daily=7,weekly=4",
                    SNAPSHOTS_MAX - 1
                ));
            };
            if rules.insert(*period, count).is_some() {
                return Err(format!("{name} is there twice"));
            }
        }
        Ok(Self(rules))
    }
}

impl Schedule {
    /// Those of the snapshots that schedules have made.
    pub fn made(snapshots: Vec<Snapshot>) -> Vec<Snapshot> {
        let is_scheduled = |one: &Snapshot| {
            let same = |(shape, byte): (&u8, u8)| match shape {
                b'0' => byte.is_ascii_digit(),
                other => *other == byte,
            };
            one.name.strip_prefix(PREFIX).is_some_and(|date| {
                date.len() == DATE.len() && DATE.iter().zip(date.bytes()).all(same)
            })
        };
        snapshots.into_iter().filter(is_scheduled).collect()
    }

    /// Whether the shortest of its periods has no snapshot yet.
    pub fn is_due(&self, made: &[Snapshot], now: u64) -> bool {
        let shortest = self.0.keys().next().expect("a schedule has a rule");
        let current = shortest.number(now);
        !made.iter().any(|one| shortest.number(one.made_secs) == current)
    }

    /// Snapshots of times to come, which a clock that was ahead has made. They count nowhere, and
    /// stay until their times have passed.
    pub fn ahead(made: &[Snapshot], now: u64) -> impl Iterator<Item = &Snapshot> {
        made.iter().filter(move |one| one.made_secs > now)
    }

    /// The snapshots that no rule needs. A rule needs the first one of each of the last N periods
    /// that have one: so what a day needs first is what its week needs, and nothing ends because no
    /// snapshots were made for some time.
    pub fn spare<'a>(&self, made: &'a [Snapshot], now: u64) -> Vec<&'a Snapshot> {
        let past = || made.iter().filter(|one| one.made_secs <= now);
        let mut needed = BTreeSet::new();
        for (period, count) in &self.0 {
            let mut firsts: BTreeMap<u64, &Snapshot> = BTreeMap::new();
            for one in past() {
                let first = firsts.entry(period.number(one.made_secs)).or_insert(one);
                if (one.made_secs, &one.name) < (first.made_secs, &first.name) {
                    *first = one;
                }
            }
            needed.extend(firsts.values().rev().take(*count).map(|one| &one.name));
        }
        past().filter(|one| !needed.contains(&one.name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::dated;

    fn made(secs: u64) -> Snapshot {
        Snapshot { name: dated(PREFIX, secs), made_secs: secs }
    }

    /// 2026-01-05, a Monday, 00:00.
    const MONDAY: u64 = 20_458 * DAY;

    #[test]
    fn a_schedule_is_read_or_refused_with_a_word() {
        let parsed: Schedule = "weekly=4,hourly=24,daily=7".parse().expect("it is one");
        assert_eq!(Ok(parsed), "hourly=24,daily=7,weekly=4".parse());
        for bad in ["", "hourly", "hourly=0", "hourly=1000", "yearly=1", "hourly=1,,daily=1"] {
            let refused = bad.parse::<Schedule>().expect_err("it is none");
            assert!(refused.contains("hourly=24,daily=7"), "{refused}");
        }
        let twice = "daily=1,daily=2".parse::<Schedule>();
        assert_eq!(twice, Err("daily is there twice".into()));
    }

    #[test]
    fn only_names_that_a_schedule_gives_are_its_own() {
        let names = ["scheduled-2026-01-05-000000", "scheduled-", "scheduled-2026-01-05-00000x"];
        let others = ["scheduled-2026-01-05-0000000", "before", "backup-2026-01-05-000000"];
        let all = names.iter().chain(&others);
        let all = all.map(|name| Snapshot { name: (*name).into(), made_secs: MONDAY }).collect();
        assert_eq!(Schedule::made(all), [made(MONDAY)]);
    }

    /// Half a year of hours, with a pause of ten days: what a reader would count out by hand.
    #[test]
    fn hours_days_and_weeks_are_thinned_and_a_pause_ends_nothing() {
        let schedule: Schedule = "hourly=24,daily=7,weekly=4".parse().expect("it is one");
        let mut there: Vec<Snapshot> = Vec::new();
        for hour in 0..24 * 180_u64 {
            let now = MONDAY + hour * 3600 + 17 * 60;
            if (100 * 24..110 * 24).contains(&hour) {
                continue;
            }
            assert!(schedule.is_due(&there, now));
            there.push(made(now));
            assert!(!schedule.is_due(&there, now + 42 * 60));
            let spare: BTreeSet<String> =
                schedule.spare(&there, now).into_iter().map(|one| one.name.clone()).collect();
            there.retain(|one| !spare.contains(&one.name));
            assert!(there.len() <= 24 + 7 + 4);
            if hour == 110 * 24 {
                assert!(there.len() > 24 + 5, "the pause has ended nothing: {there:?}");
            }
        }
        let hours: Vec<u64> = there.iter().map(|one| (one.made_secs - MONDAY) / 3600).collect();
        let last = 24 * 180 - 1;
        assert!((last - 23..=last).all(|hour| hours.contains(&hour)), "{hours:?}");
        // Days 173 to 179, of which 175 is a Monday.
        assert!((173..180).all(|day| hours.contains(&(day * 24))), "{hours:?}");
        assert!([154, 161, 168, 175].iter().all(|day| hours.contains(&(day * 24))), "{hours:?}");
        // The first hour of the last day is one of the 24 hours, that of Monday one of the 7 days.
        assert_eq!(hours.len(), 24 + 6 + 3, "{hours:?}");
    }

    #[test]
    fn a_snapshot_with_a_time_to_come_stops_no_schedule() {
        let schedule: Schedule = "daily=2".parse().expect("it is one");
        let there = [made(MONDAY), made(MONDAY + 900 * DAY)];
        assert!(schedule.is_due(&there, MONDAY + DAY));
        assert!(!schedule.is_due(&there, MONDAY + 5));
        assert_eq!(schedule.spare(&there, MONDAY + 5), Vec::<&Snapshot>::new());
    }

    #[test]
    fn a_clock_that_was_ahead_costs_no_snapshot_that_is_made_afterwards() {
        let schedule: Schedule = "hourly=3".parse().expect("it is one");
        let mut there: Vec<Snapshot> = (5..9).map(|hour| made(MONDAY + hour * 3600)).collect();
        for hour in 0..4 {
            let now = MONDAY + hour * 3600;
            there.push(made(now));
            assert_eq!(Schedule::ahead(&there, now).count(), 4);
            let spare: Vec<u64> =
                schedule.spare(&there, now).into_iter().map(|one| one.made_secs).collect();
            assert!(spare.iter().all(|secs| *secs == MONDAY), "the three newest stay: {spare:?}");
            assert_eq!(spare.len(), usize::from(hour == 3));
        }
    }
}
