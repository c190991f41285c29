import t from 'tap'
import { call, routeApp } from '../../helpers/route-app.ts'

t.test('unsupported routes are refused with advice', async t => {
  const { url, engine } = await routeApp(t)
  const refused: Array<[path: string, body: object | undefined, words: RegExp]> = [
    ['/start_profile', {}, /nsys profile/],
    ['/stop_profile', {}, /nsys profile/],
    ['/remote_instance_transfer_engine_info?rank=0', undefined, /no transfer engine here.*\/init_weights_update_group/],
    ['/get_remote_instance_transfer_engine_info?rank=0', undefined, /no transfer engine here/],
    ['/parallelism_config?rank=0', undefined, /no transfer engine here/]
  ]
  for (const [path, body, message] of refused) {
    const { status, json } = await call(url + path, body)
    t.equal(status, 400, path)
    t.match(json, { error: { code: 'UNSUPPORTED', message } }, path)
  }
  t.match(
    (await call(url + '/post_process_weights', { restore_weights_before_load: true, post_process_quantization: false }))
      .json,
    { success: true }
  )
  t.same(engine.calls, [])
})
