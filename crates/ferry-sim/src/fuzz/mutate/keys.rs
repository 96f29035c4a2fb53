//! Keys and values that no version of the code wrote, written by the journal itself: every checksum
//! on the way is right.

use super::scramble;
use crate::device::{SimDevice, SimRng, sim_env};
use crate::fuzz::bases::Base;
use ferry_device::BlockDevice;
use ferry_fs::keys::{self, Key};
use ferry_journal::{Bystander, Credits, Journal, JournalOptions};
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;

/// Bytes of keys and values that one transaction here changes, at most.
const BYTES_MAX: u32 = 64 << 10;
/// Keys looked at, at most.
const KEYS_MAX: usize = 20_000;

/// Damages what the journal on `device` holds, if it can still be opened.
pub(super) fn damage(device: &Arc<SimDevice>, base: &Base, rng: &mut SimRng) {
    let options = JournalOptions { read_only: false, ..JournalOptions::offline(1 << 20) };
    let (env, _) = sim_env(rng.next_u64());
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    let geometry = base.superblock.geometry();
    // Nobody gives segments; the home store lives with what it has.
    let opened = Journal::open(dyn_device, geometry, options, env, Arc::new(Bystander));
    let Ok((journal, _)) = opened else { return };
    let mut all: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    let scanned = journal.scan(&[], &[0xff; 32], &mut |key, value| {
        all.push((key.to_vec(), value.to_vec()));
        all.len() < KEYS_MAX
    });
    if scanned.is_err() || all.is_empty() {
        return;
    }
    // A kind of key first, then one of it: names outnumber all others by far.
    let mut kinds: Vec<(Discriminant<Key<'_>>, Vec<usize>)> = Vec::new();
    for (n, (key, _)) in all.iter().enumerate() {
        let Some(parsed) = keys::parse(key) else { continue };
        let kind = discriminant(&parsed);
        match kinds.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, group)) => group.push(n),
            None => kinds.push((kind, vec![n])),
        }
    }
    if kinds.is_empty() {
        return;
    }
    let Ok(mut transaction) = journal.begin(Credits { keys: 64, bytes: BYTES_MAX, urgent: true })
    else {
        return;
    };
    for _ in 0..1 + rng.below(4) {
        let (_, group) = rng.pick(&kinds).clone();
        let (key, value) = all[*rng.pick(&group)].clone();
        let (mut new_key, mut new_value) = (key.clone(), value);
        match rng.below(10) {
            0 => {
                transaction.delete(&key);
                continue;
            }
            1 => new_value.truncate(rng.index(new_value.len() + 1)),
            2 => new_value.extend((0..1 + rng.below(40)).map(|_| rng.next_u64() as u8)),
            3 => new_value = all[*rng.pick(&group)].1.clone(),
            4 | 5 => scramble(&mut new_key, rng),
            _ => {
                for _ in 0..1 + rng.below(2) {
                    scramble(&mut new_value, rng);
                }
            }
        }
        if !new_key.is_empty() && new_value.len() < 8192 {
            transaction.put(&new_key, &new_value);
        }
    }
    let seq = transaction.commit();
    journal.force(seq, Box::new(drop));
    // Half of the time it reaches the home store.
    if rng.chance(1, 2) {
        drop(journal.close());
    }
}
