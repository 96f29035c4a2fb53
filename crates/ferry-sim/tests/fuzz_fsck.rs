//! Whatever a volume's bytes are: a check ends, without a panic, and says something or nothing.

use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_fs::{FsckOptions, fsck};
use ferry_sim::crash::Plan;
use ferry_sim::device::{SimDevice, SimRng, sim_env};
use std::sync::Arc;

/// Blocks that hold something.
fn used(device: &SimDevice) -> Vec<u64> {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    (0..device.capacity())
        .step_by(BLOCK_SIZE)
        .filter(|at| {
            device.read(*at, &mut buf).expect("no faults");
            buf.iter().any(|b| *b != 0)
        })
        .collect()
}

fn damage(device: &SimDevice, blocks: &[u64], rng: &mut SimRng) {
    let at = *rng.pick(blocks);
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    device.read(at, &mut buf).expect("no faults");
    match rng.below(5) {
        0 => buf.fill(0),
        1 => rng.fill(&mut buf),
        2 => device.read(*rng.pick(blocks), &mut buf).expect("no faults"),
        _ => {
            let i = rng.index(BLOCK_SIZE);
            buf[i] ^= 1 << rng.below(8);
        }
    }
    device.write(at, &buf).expect("no faults");
}

#[test]
fn damaged_volumes_are_judged_without_a_panic() {
    for seed in 0..8 {
        let plan = Plan::draw(seed);
        let device = plan.first_life_crashed().expect("the run itself is sound");
        let blocks = used(&device);
        let mut rng = SimRng::new(seed);
        for n in 0..100 {
            let image = device.crash_image(0, &mut rng);
            for _ in 0..1 + rng.below(3) {
                damage(&image, &blocks, &mut rng);
            }
            let image: Arc<dyn BlockDevice> = Arc::new(image);
            let (env, _) = sim_env(n);
            let options = FsckOptions { verify_data: true, progress: None };
            if let Ok(report) = fsck(&image, options, &env) {
                assert_eq!(report.clean, report.findings.is_empty());
            }
        }
    }
}
