//! A process that is killed between any two stores leaves what was so before the call that it was
//! in, or what is so after it.

use super::*;
use ferry_sim::device::SimRng;
use ferry_sim::words::RecordedWords;

const RING: u64 = 200;

fn tail(memory: RecordedWords) -> Tail<RecordedWords> {
    Tail { ring: RING, ..Tail::new(Arc::new(memory), 7) }
}

fn end(seq: u64) -> Point {
    Point { seq: Seq(seq), position: 0, id: seq + 1000 }
}

/// What has joined: its context, its request, its changes and extents.
type Joined = (u64, Option<RequestId>, Changes, Vec<ExtentEntry>);

fn drawn(rng: &mut SimRng, number: u64, seq: u64) -> Joined {
    let bytes = |len: u64| (0..len).map(|byte| (number + byte) as u8).collect::<Vec<u8>>();
    let mut changes = Changes::new();
    for _ in 0..rng.below(4) {
        let key = Key::from(bytes(1 + rng.below(20)));
        changes.insert(key, (rng.below(4) > 0).then(|| Value::from(bytes(rng.below(90)))));
    }
    let extent = |at| ExtentEntry { offset: number << 12, len: at, crc: !at };
    let extents = (0..rng.below(3) as u32).map(extent).collect();
    let request = (rng.below(2) == 0).then_some(RequestId { slot: 3, unique: number + 1 });
    (seq, request, changes, extents)
}

/// The contexts behind `durable` that all of these have joined.
fn contexts(joined: &[Joined], durable: u64) -> Vec<UnloggedContext> {
    let mut contexts: Vec<UnloggedContext> = Vec::new();
    for (seq, _, changes, extents) in joined.iter().filter(|joined| joined.0 > durable) {
        if contexts.last().is_none_or(|context| context.seq.0 != *seq) {
            contexts.push(UnloggedContext { seq: Seq(*seq), ..Default::default() });
        }
        let context = contexts.last_mut().expect("one was added");
        context.changes.extend(changes.clone());
        context.extents.extend(extents);
    }
    contexts
}

/// What is found is a prefix of all contexts, in order, and the last one may lack what joined last.
fn is_prefix(found: &[UnloggedContext], all: &[UnloggedContext]) -> bool {
    found.len() <= all.len() && found.iter().zip(all).all(|(found, all)| found == all)
}

#[test]
fn each_kill_leaves_whole_transactions_in_order() {
    let (mut lacked, mut whole) = (0, 0);
    for seed in 0..60 {
        let mut rng = SimRng::new(seed);
        let tail = tail(RecordedWords::default());
        let (mut joined, mut open, mut durable, mut stores) = (Vec::new(), 1, 0, 0);
        tail.record(end(0).id);
        for number in 0..60 {
            let (before, durable_before) = (joined.clone(), durable);
            match rng.below(5) {
                0 if joined.iter().any(|joined: &Joined| joined.0 == open) => {
                    tail.record(end(open).id);
                    open += 1;
                }
                1 if durable + 1 < open => {
                    durable += 1;
                    tail.durable(Seq(durable));
                }
                _ => {
                    let (seq, request, changes, extents) = drawn(&mut rng, number, open);
                    tail.join(Seq(seq), request, &changes, &extents);
                    joined.push((seq, request, changes, extents));
                }
            }
            for stores in stores..=tail.memory.stores() {
                // The log has what is durable, and may have the next context that was sealed.
                for logged in durable_before..open {
                    let left = super::tests::tail(tail.memory.after(stores)).left(end(logged));
                    let [before, after] = [&before, &joined].map(|all| contexts(all, logged));
                    let fits = left.contexts == before || left.contexts == after;
                    let lacks =
                        is_prefix(&left.contexts, &before) || is_prefix(&left.contexts, &after);
                    assert!(fits || lacks, "{seed} {number}: {left:?}, {before:?} {after:?}");
                    whole += usize::from(fits && !left.contexts.is_empty());
                    lacked += usize::from(!fits);
                    let is_of = |(request, seq): &(RequestId, Seq)| {
                        joined.iter().any(|joined| joined.0 == seq.0 && joined.1 == Some(*request))
                    };
                    assert!(left.requests.iter().all(is_of), "{seed}: {left:?}");
                }
            }
            stores = tail.memory.stores();
        }
    }
    assert!(whole > 1000 && lacked > 1000, "{whole} {lacked}");
}

#[test]
fn a_log_that_somebody_else_has_written_to_takes_nothing() {
    let tail = tail(RecordedWords::default());
    tail.record(end(4).id);
    let (_, request, changes, extents) = drawn(&mut SimRng::new(1), 1, 5);
    tail.join(Seq(5), request, &changes, &extents);
    let other = Point { id: 1, ..end(4) };
    assert_eq!(tail.left(other).contexts, []);
    assert_eq!(tail.left(end(4)).contexts.len(), 1);
}

#[test]
fn what_was_taken_is_not_taken_again_and_its_requests_stay_known() {
    let tail = tail(RecordedWords::default());
    tail.record(end(4).id);
    for seq in [5, 6] {
        let request = Some(RequestId { slot: 1, unique: seq });
        let changes = Changes::from([(Key::from([seq as u8]), None)]);
        tail.join(Seq(seq), request, &changes, &[]);
    }
    let first = tail.left(end(4));
    assert_eq!((first.contexts.len(), first.logged), (2, Seq(4)));
    // Only the first one could be.
    tail.taken(Seq(5));
    tail.record(end(5).id);
    // Of the process that has taken it.
    tail.record(7);
    let other = tail.left(end(9));
    assert!(!other.is_ours && other.requests.is_empty());
    for log in [end(5), Point { id: 7, ..end(9) }] {
        let again = tail.left(log);
        assert_eq!((again.contexts.len(), again.logged), (0, Seq(4)));
        assert_eq!(again.requests, [(RequestId { slot: 1, unique: 5 }, Seq(5))]);
    }
}
