//! Random damage to random keys: a repair ends, nothing is left, the volume works, and who was not
//! hit lost nothing.

use super::*;

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// The inodes that a key concerns: its own, and the one that a name leads to.
fn concerned(key: &[u8], value: &[u8], hit: &mut BTreeSet<Ino>) {
    match keys::parse(key) {
        Some(
            Key::Inode(ino)
            | Key::Xattr(ino, _)
            | Key::Extent(ino, _)
            | Key::Orphan(ino)
            | Key::Intent(ino),
        ) => {
            hit.insert(ino);
        }
        Some(Key::Dentry(dir, ..)) => {
            hit.insert(dir);
            hit.extend(Dentry::decode(value).map(|dentry| dentry.ino));
        }
        _ => {}
    }
}

/// Damages one key, and notes whom that concerns.
fn damage(image: &mut Image, rng: &mut Rng, hit: &mut BTreeSet<Ino>) {
    let pick = |image: &Image, at: usize| {
        image.keys.iter().nth(at).map(|(k, v)| (k.clone(), v.clone())).unwrap()
    };
    let (key, value) = pick(image, rng.below(image.keys.len()));
    let (other_key, other_value) = pick(image, rng.below(image.keys.len()));
    concerned(&key, &value, hit);
    let flip = |rng: &mut Rng, bytes: &mut Vec<u8>| {
        if !bytes.is_empty() {
            let at = rng.below(bytes.len());
            bytes[at] ^= 1 << rng.below(8);
        }
    };
    let (mut new_key, mut new_value) = (key.clone(), value.clone());
    match rng.below(6) {
        0 => {
            image.keys.remove(&key);
            return;
        }
        1 | 2 => flip(rng, &mut new_value),
        3 => {
            image.keys.remove(&key);
            flip(rng, &mut new_key);
        }
        4 => new_value.truncate(rng.below(value.len() + 1)),
        _ => {
            // Another key's value, here too.
            concerned(&other_key, &other_value, hit);
            new_value = other_value;
        }
    }
    concerned(&new_key, &new_value, hit);
    // Nobody knows what keys of unknown types are; a repair leaves them.
    if keys::parse(&new_key).is_some() {
        image.keys.insert(new_key, new_value);
    }
}

#[test]
fn random_damage_is_repaired_and_harms_no_other_file() {
    let rounds = std::env::var("REPAIR_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let from = std::env::var("REPAIR_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let sound = Volume::new().snapshot();
    let mut failed = Vec::new();
    for seed in from..from + rounds {
        let case = || {
            let mut rng = Rng(seed);
            let volume = Volume::new();
            let mut hit = BTreeSet::new();
            volume.edit(|image| {
                for _ in 0..1 + rng.below(6) {
                    damage(image, &mut rng, &mut hit);
                }
            });
            let damaged = !volume.check().clean;
            let report = volume.repair();
            assert!(report.clean, "left {:#?}\nafter {:#?}", report.findings, report.repairs);
            assert!(!damaged || report.repaired > 0);
            let again = volume.repair();
            assert!(again.clean && again.repaired == 0, "again {:#?}", again.repairs);
            let by_ino: BTreeMap<_, _> =
                volume.snapshot().into_values().map(|seen| (seen.ino, seen)).collect();
            for (path, seen) in sound.iter().filter(|(_, seen)| !hit.contains(&seen.ino)) {
                let now = by_ino.get(&seen.ino).unwrap_or_else(|| panic!("{path} is gone"));
                assert_eq!((now.mode, &now.contents), (seen.mode, &seen.contents), "{path}");
            }
            volume.works("random");
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(case)).is_err() {
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?}");
}
