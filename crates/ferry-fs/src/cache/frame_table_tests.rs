//! Tests of the tables: how large they are, and what they take of the cache.

use crate::cache::frame::FOLIO_BYTES;
use crate::cache::frame::Frame;
use crate::cache::frame_table::{Front, SHARE, SMALL_SLOTS, SPREAD, Slot, TableBudget};
use std::collections::BTreeSet;
use std::sync::Arc;

const GIB: usize = 1 << 30;

fn frame(index: u64) -> Arc<Frame> {
    Arc::new(Frame::new(index, 0, 8, Arc::default()))
}

/// Folios of a file of so many that are found once each was put in.
fn found(folios: u64, budget: &TableBudget) -> usize {
    let front = Front::default();
    for index in 0..folios {
        front.put(&frame(index), folios, budget);
    }
    let found = (0..folios).filter(|index| front.get(*index, folios, budget).is_some()).count();
    budget.give_back(&front);
    assert_eq!(budget.taken(), 0);
    found
}

#[test]
fn every_folio_of_a_file_that_fits_into_the_cache_is_found() {
    for (size, limit) in [(1, 1), (5, 5), (5, 8)] {
        let folios = size * GIB / FOLIO_BYTES;
        assert_eq!(found(folios as u64, &TableBudget::new(limit * GIB)), folios);
    }
}

#[test]
fn no_table_has_more_slots_than_the_cache_has_use_for() {
    let folios = (5 * GIB / FOLIO_BYTES) as u64;
    for limit in [1 << 20, 64 << 20, 512 << 20, GIB] {
        let (front, budget) = (Front::default(), TableBudget::new(limit));
        let took = front.put(&frame(0), folios, &budget);
        assert_eq!(took, front.memory());
        let most = (SPREAD * limit / FOLIO_BYTES).max(SMALL_SLOTS) * size_of::<Slot>();
        assert!(took <= most, "{took} bytes in a cache of {limit}");
        budget.give_back(&front);
        assert_eq!(found(folios, &budget), most / size_of::<Slot>());
    }
}

#[test]
fn a_file_that_grows_is_found_in_its_smaller_table_until_it_has_a_larger_one() {
    let (front, budget) = (Front::default(), TableBudget::new(GIB));
    front.put(&frame(7), 60, &budget);
    assert!(front.get(7, 2000, &budget).is_some());
    front.put(&frame(1000), 2000, &budget);
    assert!(front.get(7, 2000, &budget).is_none(), "it is put in anew when it is read");
    front.put(&frame(7), 2000, &budget);
    front.forget(7);
    assert!([60, 2000].iter().all(|folios| front.get(7, *folios, &budget).is_none()));
}

#[test]
fn many_large_files_take_a_bounded_part_of_the_cache() {
    let limit = 256 << 20;
    let budget = TableBudget::new(limit);
    let fronts: Vec<Front> = (0..1000).map(|_| Front::default()).collect();
    let mut sizes = BTreeSet::new();
    for front in &fronts {
        front.put(&frame(5000), 1 << 20, &budget);
        assert!(front.get(5000, 1 << 20, &budget).is_some(), "in whatever table");
        sizes.insert(front.memory());
    }
    assert!(budget.taken() <= limit / SHARE);
    assert!(sizes.len() >= 2, "first files had a larger table: {sizes:?}");
    assert_eq!(sizes.first(), Some(&(SMALL_SLOTS * size_of::<Slot>())));
    fronts.iter().for_each(|front| budget.give_back(front));
    assert_eq!(budget.taken(), 0);
}
